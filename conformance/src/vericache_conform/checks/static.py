"""The package around a compressor: found by name, described truthfully, harmless to import."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vericache_conform.case import Case
from vericache_conform.catalogue import all_checks
from vericache_conform.check import check
from vericache_conform.expected import expired, read_expectations
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.processes import in_fresh_process
from vericache_conform.subject import expectations_file, version_of
from vericache_conform.variants import option_variants
from vericache_core.errors import ConfigError, OptionError, VeriCacheError
from vericache_core.plugins.discovery import CORE_DISTRIBUTION
from vericache_core.plugins.fields import METADATA_KEY, option_fields
from vericache_core.plugins.options import options_to_json, parse_options
from vericache_core.plugins.schema import options_schema
from vericache_core.plugins.spec import SUPPORTED_API_VERSIONS

IMPORT_BUDGET = 3.0
"""Seconds that importing a plugin may take when torch, transformers and the core are there already."""


def _looked(case: Case) -> dict[str, Any]:
    """What a fresh process saw; shared by the checks of one run."""
    key = "look"
    if key not in case.subject.memo:
        found = in_fresh_process(case, "look", {"with_transformers": False})
        if found.get("imports_transformers"):  # then it may have changed it, which only shows if it was there before
            found = in_fresh_process(case, "look", {"with_transformers": True})
        case.subject.memo[key] = found
    facts: dict[str, Any] = case.subject.memo[key]
    if "load_error" in facts:
        raise Failure(f"the plugin does not load: {facts['load_error']}")
    return facts


@check(
    "S-01",
    tier="static",
    cost=0.2,
    rationale="A name in a configuration must lead to exactly this compressor, or to a clear error.",
    origin="OpenTelemetry's and dbt's entry-point tests; plugins whose entry point and class disagree.",
    fix="Keep the entry-point name, CompressorSpec.name and the class's `name` equal; make the factory take the options.",
)
def resolves(case: Case) -> Evidence:
    """The name resolves to a descriptor of that name, and its factory builds a compressor of that name."""
    try:
        spec = case.subject.spec
        compressor = case.subject.create()
    except (VeriCacheError, Exception) as error:
        raise Failure(f"the compressor does not load: {error}") from error
    if spec.name != case.subject.name:
        raise Failure(f"the descriptor of {case.subject.name!r} is called {spec.name!r}")
    if compressor.name != spec.name:
        raise Failure(f"the compressor calls itself {compressor.name!r}, its descriptor {spec.name!r}")
    missing = [
        m for m in ("supports", "compress", "extend", "rollback", "restore") if not callable(getattr(compressor, m, None))
    ]
    if missing:
        raise Failure(f"the compressor has no {missing[0]}()")
    return Evidence(1, {"kind": spec.kind, "distribution": case.subject.distribution})


@check(
    "S-02",
    tier="static",
    cost=0.05,
    rationale="A plugin of another contract version would fail in the middle of a request; pip can only prevent that if the "
    "requirement says so.",
    origin="pelican #2562: plugins broken by an upgrade that their metadata allowed.",
    fix='Write the number in CompressorSpec(api_version=...), and dependencies = ["vericache>=0.1,<1"].',
)
def api_version(case: Case) -> Evidence:
    """The API version is one that this core speaks; the package requires `vericache` with a lower and an upper bound."""
    spec = case.subject.spec
    if spec.api_version not in SUPPORTED_API_VERSIONS:
        spoken = " and ".join(map(str, SUPPORTED_API_VERSIONS))
        raise Failure(f"the descriptor declares API version {spec.api_version}, this core speaks {spoken}")
    names = case.subject.distributions
    requirements = {name: _bounded(name) for name in names if canonicalize_name(name) != CORE_DISTRIBUTION}
    facts = {"distribution": " + ".join(names) or None, "requires": " + ".join(requirements.values())}
    return Evidence(1 + len(requirements), facts)


def _bounded(name: str) -> str:
    """The requirement of a distribution on the core, which must have both bounds."""
    for text in importlib.metadata.distribution(name).requires or []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Failure(f"{name} has a malformed requirement {text!r}: {error}") from error
        if canonicalize_name(requirement.name) != CORE_DISTRIBUTION:
            continue
        signs = {part.operator for part in requirement.specifier}
        if signs & {"==", "~=", "==="} or (signs & {">=", ">"} and signs & {"<", "<="}):
            return text
        raise Failure(f"{name} requires {text!r}: it needs a lower and an upper bound")
    raise Failure(f"{name} does not require {CORE_DISTRIBUTION}")


@check(
    "S-03",
    tier="static",
    cost=3.5,
    timeout=180.0,
    rationale="`vericache plugins list` runs often and with many plugins installed; a slow import delays every command.",
    origin="llm #732: a plugin that imports torch makes `--help` take seconds.",
    fix="Import heavy dependencies inside the functions that need them.",
)
def listing_and_import(case: Case) -> Evidence:
    """Listing plugins imports none of them; importing this one stays within its budget."""
    facts = _looked(case)
    if facts["imported_by_listing"]:
        raise Failure(f"listing plugins imported {', '.join(facts['imported_by_listing'])}")
    if facts["import_seconds"] > IMPORT_BUDGET:
        raise Failure(f"importing the plugin took more than {IMPORT_BUDGET:g} s with torch and transformers imported before")
    return Evidence(2, {"import_seconds": round(facts["import_seconds"], 3)})


@check(
    "S-04",
    tier="static",
    cost=0.05,
    rationale="Options come from files, command lines and payloads. What cannot be told, checked or written down will be wrong "
    "somewhere.",
    origin="xarray's detect_parameters; options that a payload forgets.",
    fix="Declare every field with option(default, help=..., and a range, choices or a bool); keep the dataclass frozen.",
)
def options_describe_themselves(case: Case) -> Evidence:
    """Options are a frozen dataclass; every field has help and a range; JSON and schema round-trip."""
    options_type = case.subject.spec.options
    fields = option_fields(options_type)
    for name, field in fields.items():
        raw = options_type.__dataclass_fields__[name].metadata
        if METADATA_KEY not in raw or not field.info.help.strip():
            raise Failure(f"option {name!r} has no help")
        info, numeric = field.info, field.type.base in (int, float)
        bounds = (info.ge, info.gt, info.le, info.lt, info.choices, field.type.choices)
        if numeric and all(bound is None for bound in bounds):
            raise Failure(f"option {name!r} is a number without a range")
    variants, _ = option_variants(case.subject)
    for given in ({}, *case.subject.option_sets(), *variants):
        made = parse_options(options_type, given)
        plain = options_to_json(made)
        try:
            back = parse_options(options_type, json.loads(json.dumps(plain)))
            hash(back)
        except (OptionError, TypeError, ValueError) as error:
            raise Failure(f"options {given} do not survive JSON: {error}", example={"options": given}) from error
        if back != made:
            raise Failure(f"options {given} come back from JSON as {back}", example={"options": given})
    schema = options_schema(options_type)
    if set(schema.get("properties", {})) != set(fields):
        raise Failure("the JSON schema lists other fields than the dataclass")
    return Evidence(1 + len(fields) + len(variants))


@check(
    "S-05",
    tier="static",
    cost=0.05,
    timeout=180.0,
    rationale="Whoever installs a plugin does not expect it to change how other models run, how many threads torch uses or "
    "what gets logged.",
    origin="kvpress patches every attention function of transformers on import.",
    fix="Do at import time nothing but definitions; set what you need inside compress and set it back.",
)
def import_changes_nothing(case: Case) -> Evidence:
    """Importing the plugin changes no global: torch flags, threads, generators, attention registry, logging, warnings."""
    changed = _looked(case)["changed"]
    if changed:
        raise Failure(f"importing the plugin changes: {', '.join(changed)}", facts={"changed": changed})
    return Evidence(1)


@check(
    "S-06",
    tier="static",
    cost=0.05,
    timeout=180.0,
    rationale="Compression runs inside servers without network, with read-only disks, on other people's prompts.",
    origin="Presses that download statistics when they are built.",
    fix="Ship data inside the package; take folders from options; write nothing.",
)
def no_network_no_files(case: Case) -> Evidence:
    """Importing, building and compressing use no network, start no process and write no file outside a temporary folder."""
    events = _looked(case)["events"]
    if events:
        raise Failure(f"{len(events)} forbidden action(s), the first: {events[0]}", facts={"events": events})
    return Evidence(1)


@check(
    "S-07",
    tier="static",
    cost=0.05,
    timeout=180.0,
    rationale="stdout belongs to the user's data: one printed line breaks `--json` and every pipe.",
    origin="Progress bars and debug prints in libraries.",
    fix="Use logging with a logger of your own, and no handler.",
)
def quiet(case: Case) -> Evidence:
    """Importing, building and compressing print nothing."""
    facts = _looked(case)
    if facts["output"].strip():
        first = facts["output"].strip().splitlines()[0]
        raise Failure(f"something is printed: {first!r}")
    if not isinstance(facts["events"], list):
        raise Skip("nothing was observed")
    return Evidence(1)


@check(
    "S-08",
    tier="static",
    cost=0.05,
    rationale="A list of expected failures that nobody checks hides regressions behind typos and old entries.",
    origin="databricks-sql-python #125, #253, #256: skip lists that nobody could explain any more.",
    fix="Correct the named line; every entry needs id, state, reason, and should have an issue and an expiry.",
)
def expectations_are_sound(case: Case) -> Evidence:
    """conformance.toml is well formed: known checks, states, reasons, no entry past its expiry."""
    path = expectations_file(case.subject)
    if path is None:
        return Evidence(1, {"file": None})
    try:
        read = read_expectations(path, all_checks())
    except ConfigError as error:
        raise Failure(f"{error.message}" + (f"; {error.hint}" if error.hint else "")) from error
    version = version_of(case.subject)
    for entry in read.expected.values():
        if expired(entry, version):
            raise Failure(f"{path.name}: the entry for {entry.id} expired with version {entry.expires}; this is {version}")
    return Evidence(1 + len(read.expected), {"file": path.name, "expected_failures": sorted(read.expected)})
