"""Commands of `pyengine`, one file each; cli.py names them, and none is imported before it is called."""
