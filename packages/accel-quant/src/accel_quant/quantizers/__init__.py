"""How a linear layer is quantized, one file for each way."""
