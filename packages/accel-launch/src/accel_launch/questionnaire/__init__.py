"""The questionnaire of ``accel config``."""
