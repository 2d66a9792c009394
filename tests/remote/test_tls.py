"""TLS and client certificates, with an authority of our own."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any

import pytest

from tests.remote.stores import drafter, plain, prompts, same, store_engine, token_file
from vericache_core.errors import RemoteError
from vericache_core.remote.auth import Guard, channel_credentials, server_credentials
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import read_tokens

x509 = pytest.importorskip("cryptography.x509")

PARAMS = SamplingParams(max_new_tokens=8)


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(self._certificate(self.subject, self.key.public_key(), authority=True))

    def issue(self, name: str) -> tuple[str, str]:
        """Files of a certificate and its key."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        cert, secret = self.folder / f"{name}-cert.pem", self.folder / f"{name}-key.pem"
        cert.write_bytes(self._certificate(subject, key.public_key(), authority=False))
        form = serialization.PrivateFormat.PKCS8
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return str(cert), str(secret)

    def _certificate(self, subject: object, public: object, *, authority: bool) -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization

        now = dt.datetime.now(dt.timezone.utc)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        signed: bytes = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return signed


@pytest.mark.fault("strangers", "certificates of strangers, or none")
def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path, "ours"), Authority(tmp_path, "strangers")
    credentials = server_credentials(*ours.issue("store"), ours.file)
    guard = Guard(read_tokens(token_file(tmp_path)))
    server = StoreServer(store_engine(), "127.0.0.1:0", guard, credentials)
    server.start()
    try:
        cert, key = ours.issue("drafter")
        trusted: dict[str, Any] = {"remote_ca": ours.file, "remote_cert": cert, "remote_key": key}
        with drafter(tmp_path, server.port, **trusted) as engine:
            got = engine.generate(prompts(1), PARAMS)
            same(got, plain(prompts(1), PARAMS))
            assert not got[0].metrics.degraded
        foreign_cert, foreign_key = strangers.issue("foreign")
        wrongs: tuple[dict[str, Any], ...] = (
            {"remote_ca": strangers.file, "remote_cert": cert, "remote_key": key},  # a store that nobody vouches for
            {"remote_ca": ours.file},  # no certificate of our own
            {"remote_ca": ours.file, "remote_cert": foreign_cert, "remote_key": foreign_key},
            {},  # plain text
        )
        for wrong in wrongs:
            with pytest.raises(RemoteError, match="hello"):
                drafter(tmp_path, server.port, on_remote_error="fail", remote_timeout=5.0, **wrong)
        assert not server.verifier.sessions
    finally:
        server.stop()


def test_certificates_with_comments_in_any_alphabet(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    file = Path(authority.file)
    file.write_bytes("# Zertifizierungsstelle Köln\n".encode() + file.read_bytes())
    channel_credentials(str(file), None, None)
