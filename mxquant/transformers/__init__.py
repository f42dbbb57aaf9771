"""The bridge to Hugging Face transformers: the only folder of the library that imports it."""
