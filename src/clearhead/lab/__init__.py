"""The lab: a page of this machine to work with attention in."""
