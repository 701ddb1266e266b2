"""GGUF exports, which llama.cpp and Ollama load, written with llama.cpp's own converter."""
