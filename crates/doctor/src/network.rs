//! Network settings for iSCSI.

use crate::finding::{Area, Finding};
use crate::host::Host;

/// Link speed in Mbit/s above which default buffers are too small.
const FAST_MBIT: i64 = 10_000;
/// Buffer size in bytes: data in flight on a 10 Gbit/s link in 10 ms, rounded up.
const BUFFER: i64 = 16 << 20;
const JUMBO: i64 = 9000;

pub(crate) fn examine(host: &Host, findings: &mut Vec<Finding>) {
    let mut is_fast = false;
    for name in host.names("/sys/class/net") {
        let of = |file: &str| host.text(&format!("/sys/class/net/{name}/{file}"));
        let speed: i64 = of("speed").and_then(|text| text.parse().ok()).unwrap_or(0);
        let is_real = of("device/vendor").is_some() && of("operstate").as_deref() == Some("up");
        if !is_real || speed < FAST_MBIT {
            continue;
        }
        is_fast = true;
        let mtu: i64 = of("mtu")
            .and_then(|text| text.parse().ok())
            .unwrap_or(JUMBO);
        if mtu < JUMBO {
            let found = format!("{name} ({} Gbit/s) has an MTU of {mtu}", speed / 1000);
            let why = "The same data needs six times as many packets as with jumbo frames. All hosts and switches on the path must use the same MTU.";
            findings.push(
                Finding::note("mtu", Area::Network, found, why)
                    .by(format!("ip link set {name} mtu {JUMBO}")),
            );
        }
    }
    for (check, file) in [
        ("rmem_max", "/proc/sys/net/core/rmem_max"),
        ("wmem_max", "/proc/sys/net/core/wmem_max"),
    ] {
        let Some(bytes) = host.number(file).filter(|bytes| is_fast && *bytes < BUFFER) else {
            continue;
        };
        let found = format!("net.core.{check} is {bytes}, with a link of 10 Gbit/s or more");
        let why = "A connection cannot have more data in flight than its buffers hold.";
        findings.push(
            Finding::worth(check, Area::Network, found, why)
                .by("lunette doctor --profile iscsi-10g --apply"),
        );
    }
    let off = |file: &str| host.number(file) == Some(0);
    for (check, file, why) in [
        (
            "tcp_window_scaling",
            "/proc/sys/net/ipv4/tcp_window_scaling",
            "Without window scaling, a connection has at most 64 KiB in flight.",
        ),
        (
            "tcp_sack",
            "/proc/sys/net/ipv4/tcp_sack",
            "Without it, all data after a lost packet are sent again. Some guides for lossless links turn it off.",
        ),
    ] {
        if off(file) {
            let found = format!("net.ipv4.{check} is off");
            let finding = Finding::worth(check, Area::Network, found, why);
            findings.push(finding.by_writing(vec![file.to_owned()], "1"));
        }
    }
}
