"""What we know about language models: families, one decoder, its numpy reference. Imports nothing of ours."""
