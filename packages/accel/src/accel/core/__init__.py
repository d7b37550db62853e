"""What the Accelerator is built from: resolved settings, prepared objects, and the way back to the model that was
passed in.
"""
