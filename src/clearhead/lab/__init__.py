"""The lab: a local web page to experiment with attention."""
