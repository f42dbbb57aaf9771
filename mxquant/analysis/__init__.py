"""What weights are like before anything is quantized: narrow or wide, and what a format makes of that."""
