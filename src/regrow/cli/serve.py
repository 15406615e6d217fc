"""`regrow serve`: a place on this host, for a process that a lead elsewhere wants."""

from __future__ import annotations

import click

from regrow.errors import UserError

LEAD_ADDRESS = "HOST:PORT"
ROLES = ("server", "worker", "coordinator", "standby")


def check_address(text: str) -> str:
    """As transports know it."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{text!r} is not an address", hint="it is like 10.0.0.5:7000")
    return f"tcp:{host.strip('[]')}:{port}"


tls_option = click.option(
    "--tls",
    default="off",
    metavar="off|auto|DIR",
    show_default=True,
    help="Encrypt all connections: with a certificate made of the token, or that of DIR. The same everywhere.",
)
token_option = click.option(
    "--token-file", required=True, metavar="FILE", help="The run's token, in a file that nobody else can read."
)


@click.command(short_help="A place on this host for a process of a run that is led elsewhere.")
@click.option("--role", type=click.Choice(ROLES), required=True, help="What it is for.")
@click.option("--id", "id", type=click.IntRange(0, 65535), default=0, show_default=True, help="Which of them.")
@click.option("--coordinator", "--lead", "lead", required=True, metavar=LEAD_ADDRESS, help="Where `regrow lead` is.")
@token_option
@click.option("--advertise", default="", metavar="INTERFACE|CIDR", help="Which address others reach this host at.")
@click.option("--logs", default="logs", show_default=True, metavar="DIR", help="For the logs of what runs here.")
@tls_option
def serve(role: str, id: int, lead: str, token_file: str, advertise: str, logs: str, tls: str) -> None:
    """Keeps a place for one process of a run. Slurm, systemd or a pod starts one on every host; `regrow lead` says what
    runs in it. Ends with 0 when the run is over.

    \b
    regrow serve --role coordinator --coordinator 10.0.0.1:7000 --token-file token
    regrow serve --role server --id 3 --coordinator 10.0.0.1:7000 --token-file token
    regrow serve --role standby --coordinator 10.0.0.1:7000 --token-file token --advertise 10.0.0.0/16
    """
    from regrow.launch import keeper  # late: numpy and the transport

    keeper.keep(
        role=role, id=id, lead=check_address(lead), token_file=token_file, advertise=advertise, logs=logs, tls=tls
    )
