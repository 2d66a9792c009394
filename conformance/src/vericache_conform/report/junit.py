"""JUnit XML, as CI systems read it."""

from __future__ import annotations

import xml.etree.ElementTree as ET  # written here, not parsed

from vericache_conform.outcome import Result
from vericache_conform.report.model import Report


def junit_xml(report: Report) -> str:
    """A suite per compressor, a case per check. Expected failures are skipped cases, unexpected passes failures."""
    root = ET.Element("testsuites", name="vericache-conform")
    for name in report.subjects:
        results, counts = report.of(name), report.counts(name)
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(results)),
            failures=str(counts["fail"] + counts["xpass"]),
            errors=str(counts["error"]),
            skipped=str(counts["skip"] + counts["xfail"]),
            time=f"{sum(result.seconds for result in results):.3f}",
            timestamp=str(report.header.get("started", "")).rstrip("Z"),
        )
        for result in results:
            _case(suite, result)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, result: Result) -> None:
    case = ET.SubElement(
        suite, "testcase", classname=f"vericache_conform.{result.subject}", name=result.check, time=f"{result.seconds:.3f}"
    )
    tag = {"fail": "failure", "xpass": "failure", "error": "error", "skip": "skipped", "xfail": "skipped"}.get(result.outcome)
    if tag is not None:
        element = ET.SubElement(case, tag, message=_legal(result.message))
        if result.reproduce and tag != "skipped":
            element.text = _legal(f"{result.message}\nexample: {result.example}\nreproduce: {result.reproduce}")
    if result.output:
        ET.SubElement(case, "system-out").text = _legal(result.output)


def _legal(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(letter for letter in text if letter >= " " or letter in "\t\n")
