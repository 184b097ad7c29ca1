"""Training: tables and text into models, in run folders that can be resumed and read back."""

from clearhead.train.batches import Batch, Sequences, split
from clearhead.train.classify import train_classifier, train_text_classifier
from clearhead.train.engine import Engine, Outcome, Task, Trained, Weighed
from clearhead.train.gradient_order import GradientSum
from clearhead.train.language import train_language_model, train_text_language_model
from clearhead.train.options import ClassifierOptions, LanguageOptions, ParallelOptions, TrainingOptions
from clearhead.train.progress import Silent, watcher_for
from clearhead.train.saved import Run, load_run

__all__ = [
    "Batch",
    "ClassifierOptions",
    "Engine",
    "GradientSum",
    "LanguageOptions",
    "Outcome",
    "ParallelOptions",
    "Run",
    "Sequences",
    "Silent",
    "Task",
    "Trained",
    "TrainingOptions",
    "Weighed",
    "load_run",
    "split",
    "train_classifier",
    "train_language_model",
    "train_text_classifier",
    "train_text_language_model",
    "watcher_for",
]
