"""Models and data sets on the Hugging Face Hub: downloading, and pushing results."""
