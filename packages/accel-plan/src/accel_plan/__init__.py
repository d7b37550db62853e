"""What a configuration would do on many processes, found out in one, without their devices and without memory for weights."""
