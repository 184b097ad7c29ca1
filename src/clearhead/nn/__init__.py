"""Modules: attention with projections, blocks, and whole models. Layout ``[batch, len, embed_dim]``."""

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.block_spec import BlockSpec
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.classifier import SequenceClassifier
from clearhead.nn.decoder_cache import DecoderCache
from clearhead.nn.encoder_decoder import EncoderDecoder
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.language_model import LanguageModel
from clearhead.nn.linear_attention import LinearAttention
from clearhead.nn.stacks import Decoder, Encoder

__all__ = [
    "BlockSpec",
    "Decoder",
    "DecoderBlock",
    "DecoderCache",
    "Encoder",
    "EncoderBlock",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "LinearAttention",
    "MultiHeadAttention",
    "SequenceClassifier",
]
