"""Real schedulers, daemons and networks for the tests of launching: started here, on loopback, and taken down again."""
