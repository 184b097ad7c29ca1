"""Whole models, each in a file of its own."""

from clearhead.nn.classifier import SequenceClassifier
from clearhead.nn.encoder_decoder import EncoderDecoder
from clearhead.nn.language_model import LanguageModel

__all__ = ["EncoderDecoder", "LanguageModel", "SequenceClassifier"]
