"""`python -m crosscurrent`, which torchrun needs."""

from crosscurrent.cli.main import app

if __name__ == "__main__":
    app()
