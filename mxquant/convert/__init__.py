"""From one checkpoint to another: plan, quantize, resume, dequantize, report."""
