"""Runs worker.py in its place, from cached bytecode: Python compiles the file that it is started with every time.

Started by path, with the arguments of worker.py. A plain import would need the directory in ``sys.path``, where
``python -P`` does not put it, and would leave a module that scripts see.
"""

import os

if __name__ == "__main__":
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    # The class that has loaded this file, importlib.machinery.SourceFileLoader, whose module need not be imported.
    loader = type(globals()["__loader__"])("__main__", path)
    scope = {"__name__": "__main__", "__file__": path, "__loader__": loader, "__builtins__": __builtins__}
    exec(loader.get_code("__main__"), scope)
