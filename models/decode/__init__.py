"""Generation of text, and the states of mixers that it keeps."""
