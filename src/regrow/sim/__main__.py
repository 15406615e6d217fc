"""`python -m regrow.sim` is `regrow sim`."""

from regrow.errors import RegrowError
from regrow.sim.command import sim

if __name__ == "__main__":
    try:
        sim(prog_name="regrow sim")
    except RegrowError as error:
        raise SystemExit(f"error: {error}") from None
