"""Modules: attention with projections, blocks, and whole models. Layout ``[batch, len, embed_dim]``."""

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.models import EncoderDecoder, LanguageModel, SequenceClassifier
from clearhead.nn.stacks import Decoder, DecoderCache, Encoder

__all__ = [
    "Decoder",
    "DecoderBlock",
    "DecoderCache",
    "Encoder",
    "EncoderBlock",
    "EncoderDecoder",
    "FeedForward",
    "LanguageModel",
    "MultiHeadAttention",
    "SequenceClassifier",
]
