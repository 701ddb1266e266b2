"""Compare the answers of vLLM with those of transformers and PEFT, on exports of tiny models."""
