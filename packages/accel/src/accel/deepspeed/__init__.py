"""DeepSpeed: its settings, and the engines that it trains with."""
