"""Statistics of every head of a model over a corpus of texts, on one process or on many."""

from clearhead.corpus.options import CorpusOptions, CorpusProgress
from clearhead.corpus.run import observe_corpus
from clearhead.corpus.summary import CorpusSummary, HeadFigures

__all__ = ["CorpusOptions", "CorpusProgress", "CorpusSummary", "HeadFigures", "observe_corpus"]
