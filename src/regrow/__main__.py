"""`python -m regrow` is `regrow`."""

from __future__ import annotations

from regrow.cli.main import main

if __name__ == "__main__":
    main()
