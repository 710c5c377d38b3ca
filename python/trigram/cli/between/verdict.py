"""What hosts have found out about each other, as lines: what is wrong, and what to do, in order of gain."""

from __future__ import annotations

import math
from typing import Any

from rich.filesize import decimal

from trigram.cli.doctor import Check
from trigram.runtime import far_links

_FAR = 0.002
"""Seconds of a round trip from which links are far (docs/tuning.md)."""
_LOSSY = 0.001
_UNEQUAL = 0.5
"""A host whose best rate is less than this part of the others' is named."""
_CLOCK = 1.0
_SMALL_SHM = 256 << 20


def checks(found: dict[str, Any]) -> list[Check]:
    """The verdict: failures first, then what gains most.

    Args:
        found: What :func:`trigram.cli.between.meeting.take_part` returns.
    """
    lines = [*_reached(found), *_alike(found), *_stalls(found), *_links(found), *_hosts(found)]
    order = {"fail": 0, "warn": 1, "ok": 2}
    return sorted(lines, key=lambda check: order[check.status])


def name(found: dict[str, Any], i: int) -> str:
    """A host in words: its name, and its first address if another has the same name."""
    host = found["hosts"][i]
    same = [h for h in found["hosts"] if h["host"] == host["host"]]
    if len(same) == 1:
        return str(host["host"])
    first = host["addresses"][0]["address"] if host["addresses"] else f"number {i}"
    return f"{host['host']} ({first})"


def _pairs(found: dict[str, Any]) -> list[tuple[int, int]]:
    n = len(found["hosts"])
    return [(i, j) for i in range(n) for j in range(n) if i != j]


def reaches(found: dict[str, Any], i: int, j: int) -> bool:
    """Whether host i reaches host j over one of its addresses."""
    return any(a["result"] == "ok" for a in found["reach"][i][j])


def _reached(found: dict[str, Any]) -> list[Check]:
    lines, n = [], len(found["hosts"])
    hidden = [j for j in range(n) if n > 1 and not any(reaches(found, i, j) for i in range(n) if i != j)]
    for j in hidden:
        outwards = all(reaches(found, j, i) for i in range(n) if i not in (j, *hidden))
        tried = [a for i in range(n) if i != j for a in found["reach"][i][j]]
        host, port = name(found, j), found["hosts"][j]["port"]
        if not found["hosts"][j]["addresses"]:
            advice = "it has no address but loopback's: connect it to the network, or unset TRIGRAM_IFACE"
            lines.append(Check("reach", "fail", f"nobody reaches {host}", advice))
        elif outwards and n - len(hidden) >= 1:
            seen = _seen(found, j)
            behind = f"; others see it as {', '.join(seen)}, so it is behind a router (NAT)" if seen else ""
            advice = (
                f"set TRIGRAM_OUTWARD=1 on it, so that it connects to the others (docs/sites.md), or let "
                f"port {port} in: TRIGRAM_PORT fixes it"
            )
            found_ = f"nobody reaches {host}, which reaches all others{behind} ({_why(tried)})"
            lines.append(Check("reach", "fail", found_, advice))
        else:
            advice = f"check its firewall and route: {_advice(tried, port)}"
            lines.append(Check("reach", "fail", f"nobody reaches {host} ({_why(tried)})", advice))
    for i, j in _pairs(found):
        if reaches(found, i, j) or j in hidden:
            continue
        back = "; the other direction works" if reaches(found, j, i) else ""
        tried = found["reach"][i][j]
        what = f"{name(found, i)} does not reach {name(found, j)} ({_why(tried)}){back}"
        lines.append(Check("reach", "fail", what, _advice(tried, found["hosts"][j]["port"])))
    if not lines:
        lines.append(Check("reach", "ok", f"all {n} hosts reach each other, in each direction"))
    for j in range(n):
        silent = [a["address"] for a in found["hosts"][j]["addresses"] if _never(found, j, a["address"])]
        if silent and j not in hidden:
            first = _first(found, j)
            advice = f"set TRIGRAM_IFACE={first} there, if a job chooses another" if first else ""
            what = f"of {name(found, j)}, nobody reaches {', '.join(silent)}"
            lines.append(Check("addresses", "ok", what, advice))
    return lines


def _never(found: dict[str, Any], j: int, address: str) -> bool:
    n = len(found["hosts"])
    tried = [a for i in range(n) if i != j for a in found["reach"][i][j] if a["address"] == address]
    return bool(tried) and all(a["result"] != "ok" for a in tried)


def _first(found: dict[str, Any], j: int) -> str:
    ways = [found["ways"][i][j] for i in range(len(found["hosts"])) if i != j and found["ways"][i][j]]
    address = ways[0]["address"] if ways else ""
    return next((a["interface"] for a in found["hosts"][j]["addresses"] if a["address"] == address), "")


def _seen(found: dict[str, Any], j: int) -> list[str]:
    """Addresses from which others see this host, and which it does not have."""
    own = {a["address"] for a in found["hosts"][j]["addresses"]}
    seen = {a["seen"] for tried in found["reach"][j] for a in tried if a["result"] == "ok"}
    return sorted(seen - own - {""})


def _why(tried: list[dict[str, Any]]) -> str:
    texts = [f"{a['address']}: {a['result']}" for a in tried]
    return ", ".join(dict.fromkeys(texts)) or "it has no address"


def _advice(tried: list[dict[str, Any]], port: int) -> str:
    results = {a["result"] for a in tried}
    if "dropped" in results:
        return (
            f"a firewall drops packets: let TCP port {port} in on that host (TRIGRAM_PORT fixes the port), "
            "or all ports from the other hosts"
        )
    if "refused" in results:
        return f"a firewall refuses port {port}, or another network answers: let the port in (TRIGRAM_PORT)"
    if "unreachable" in results:
        return "there is no route: give both an interface in one network (TRIGRAM_IFACE), or a route"
    if "other" in results:
        return (
            "each has this address in a network of its own (containers'): set TRIGRAM_IFACE to the right one"
        )
    return "see the system's error"


def _alike(found: dict[str, Any]) -> list[Check]:
    lines, hosts = [], found["hosts"]
    for what, status in (("trigram", "fail"), ("torch", "warn"), ("python", "warn")):
        by: dict[str, list[str]] = {}
        for i, host in enumerate(hosts):
            by.setdefault(str(host["versions"][what]), []).append(name(found, i))
        if len(by) > 1:
            text = "; ".join(f"{v} on {', '.join(names)}" for v, names in by.items())
            lines.append(
                Check(what, "fail" if status == "fail" else "warn", text, "install the same on all hosts")
            )
        else:
            lines.append(Check(what, "ok", f"{next(iter(by))} on all"))
    secrets = {host["secret"] for host in hosts}
    if len(secrets) > 1:
        none = [name(found, i) for i, host in enumerate(hosts) if not host["secret"]]
        text = f"not set on {', '.join(none)}" if none else "different"
        lines.append(Check("job secret", "fail", text, "set the same TRIGRAM_SECRET on all hosts"))
    else:
        lines.append(Check("job secret", "ok", "the same on all" if secrets - {""} else "none on any"))
    own = ("TRIGRAM_IFACE", "TRIGRAM_PORT", "TRIGRAM_OUTWARD", "TRIGRAM_ANNOUNCE", "TRIGRAM_DRAIN")
    names = {k for host in hosts for k in host["settings"] if k not in own}
    for variable in sorted(names):
        values = {host["settings"].get(variable) for host in hosts}
        if len(values) > 1:
            text = "; ".join(
                f"{h['settings'].get(variable)} on {name(found, i)}" for i, h in enumerate(hosts)
            )
            lines.append(Check(variable, "warn", text, "set the same on all hosts (docs/tuning.md)"))
    return lines


def _stalls(found: dict[str, Any]) -> list[Check]:
    lines = []
    for i, j in _pairs(found):
        way = found["ways"][i][j]
        if way and way["stalled"]:
            text = f"from {name(found, i)} to {name(found, j)}: large messages do not arrive, small ones do"
            advice = (
                f"the path carries smaller packets than {way['packet'] or 'its interface'} bytes: lower the "
                "interface's MTU (ip link set DEV mtu 1280), or sysctl -w net.ipv4.tcp_mtu_probing=1"
            )
            lines.append(Check("large messages", "fail", text, advice))
    return lines


def _links(found: dict[str, Any]) -> list[Check]:
    lines: list[Check] = []
    n = len(found["hosts"])
    ways = {(i, j): found["ways"][i][j] for i, j in _pairs(found) if found["ways"][i][j]}
    good = {pair: way for pair, way in ways.items() if not way["stalled"]}
    if not good:
        return lines
    best = [max([w["rate"] for (i, j), w in good.items() if k in (i, j)], default=0.0) for k in range(n)]
    top = sorted(best)[n // 2] if n > 2 else max(best)
    slow = [k for k in range(n) if 0 < best[k] < _UNEQUAL * top]
    for k in slow:
        text = f"{name(found, k)} carries {_rate(best[k])} at most, others {_rate(top)}"
        advice = "check its cable and its switch port (ethtool); Trigram gives it less of each sum meanwhile"
        lines.append(Check("slow link", "warn", text, advice))
    lossy = {pair: way for pair, way in good.items() if way["lost"] > _LOSSY}
    if lossy:
        (i, j), worst = max(lossy.items(), key=lambda item: item[1]["lost"])
        text = f"{100 * worst['lost']:.2g} % of packets sent again from {name(found, i)} to {name(found, j)}"
        lines.append(Check("lost packets", "warn", text, _without_bbr(found, far=worst["trip"] >= _FAR)))
    far = {pair: way for pair, way in good.items() if way["trip"] >= _FAR}
    without = [name(found, k) for k in range(n) if far_links.BBR not in found["hosts"][k]["controls"]]
    if far and without and not lossy:
        (i, j), longest = max(far.items(), key=lambda item: item[1]["trip"])
        way_ = f"{1e3 * longest['trip']:.0f} ms from {name(found, i)} to {name(found, j)}"
        text = f"{way_}, no BBR on {', '.join(without)}"
        lines.append(Check("far links", "warn", text, _without_bbr(found, far=True)))
    for (i, j), way in far.items():
        wanted = max(best[i], best[j]) * way["trip"]
        room = min(found["hosts"][k]["socket_bytes"] for k in (i, j)) * far_links.STREAMS
        if 0 < room < wanted:
            text = (
                f"{name(found, i)} to {name(found, j)}: {decimal(int(wanted))} under way fill it, and "
                f"sockets hold {decimal(room)}"
            )
            advice = (
                'sysctl -w net.ipv4.tcp_wmem="4096 16384 16777216" net.ipv4.tcp_rmem="4096 131072 33554432" '
                "on both"
            )
            lines.append(Check("socket buffers", "warn", text, advice))
            break
    packets = {a["mtu"] for h in found["hosts"] for a in h["addresses"] if _used(found, a["address"])}
    if len(packets) > 1:
        text = f"interfaces have {' and '.join(map(str, sorted(packets)))} bytes"
        lines.append(Check("MTU", "warn", text, "set the same MTU on all hosts of one network"))
    clocks = {pair: way for pair, way in good.items() if abs(way["clock"]) > _CLOCK}
    if clocks:
        (i, j), way = max(clocks.items(), key=lambda item: abs(item[1]["clock"]))
        text = f"{name(found, j)} is {way['clock']:+.1f} s beside {name(found, i)}"
        lines.append(
            Check("clocks", "warn", text, "run chrony or systemd-timesyncd: logs are compared by time")
        )
    trips = [way["trip"] for way in good.values() if not math.isnan(way["trip"])]
    rates = [way["rate"] for way in good.values()]
    text = (
        f"{_rate(min(rates))} to {_rate(max(rates))} by one connection, {1e3 * min(trips):.2g} to "
        f"{1e3 * max(trips):.2g} ms"
    )
    lines.append(Check("links", "ok", text, "trigram plan compares algorithms at these rates"))
    return lines


def _used(found: dict[str, Any], address: str) -> bool:
    return any(way and way["address"] == address for row in found["ways"] for way in row)


def _without_bbr(found: dict[str, Any], far: bool) -> str:
    without = [name(found, k) for k, h in enumerate(found["hosts"]) if far_links.BBR not in h["controls"]]
    if without:
        return f"BBR bears losses; as root on {', '.join(without)}: {far_links.remedy(far_links.BBR)}"
    return (
        "Trigram uses BBR there"
        if far
        else "check cables and switch ports (ethtool -S); TRIGRAM_CONGESTION=bbr bears losses"
    )


def _hosts(found: dict[str, Any]) -> list[Check]:
    lines = []
    for i, host in enumerate(found["hosts"]):
        if host["shm_bytes"] < _SMALL_SHM:
            text = f"{decimal(host['shm_bytes'])} on {name(found, i)}"
            lines.append(
                Check("/dev/shm", "warn", text, "DataLoader workers need it: docker run --shm-size=1g")
            )
    return lines


def _rate(bytes_per_second: float) -> str:
    megabits = 8 * bytes_per_second / 1e6
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"


def table(found: dict[str, Any]) -> list[list[str]]:
    """A row for each host, with what it finds on the way to each: a rate and a round trip, or why not."""
    n = len(found["hosts"])
    rows = []
    for i in range(n):
        cells = []
        for j in range(n):
            way = found["ways"][i][j]
            if i == j:
                cells.append("-")
            elif way is None:
                cells.append(
                    ", ".join(dict.fromkeys(a["result"] for a in found["reach"][i][j])) or "no address"
                )
            elif way["stalled"]:
                cells.append("stalled")
            else:
                cells.append(f"{_rate(way['rate'])}, {1e3 * way['trip']:.2g} ms")
        rows.append([name(found, i), *cells])
    return rows
