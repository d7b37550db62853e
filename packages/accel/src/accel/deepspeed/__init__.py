"""DeepSpeed support: the plugin's settings, and the engines that train the models."""
