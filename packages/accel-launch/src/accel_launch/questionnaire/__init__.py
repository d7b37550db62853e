"""The questionnaire of ``accel config``: what is asked, in which order, and how."""
