//! Results of runs, from the output of the load generator.

use std::collections::BTreeMap;

use bench::run::Disturbance;
use serde_json::Value;

use super::{Case, DiskRoute, Run};
use crate::vm::bench::{add_bins, quantile};

impl Run {
    /// Combines all jobs of a load generator's result.
    pub fn of(document: &Value, way: &DiskRoute, case: &Case, turn: u32) -> Run {
        let jobs = document["jobs"].as_array().map_or(&[][..], Vec::as_slice);
        let sides = || jobs.iter().flat_map(|job| [&job["read"], &job["write"]]);
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let ios: f64 = sides().map(|side| number(&side["total_ios"])).sum();
        let per_io = |sum: f64| if ios > 0.0 { sum / ios } else { 0.0 };
        let total_ns =
            sides().map(|side| number(&side["lat_ns"]["mean"]) * number(&side["total_ios"]));
        let sum = |side: &str, key: &str| jobs.iter().map(|job| number(&job[side][key])).sum();
        let mut latencies = BTreeMap::new();
        for side in sides() {
            add_bins(&mut latencies, side);
        }
        let guest = &document["vm"]["guest_cpu_ns"];
        let guest = |words: &[&str]| per_io(words.iter().map(|word| number(&guest[*word])).sum());
        Run {
            way: way.variant.name.clone(),
            case: case.name.clone(),
            turn,
            read_iops: sum("read", "iops"),
            write_iops: sum("write", "iops"),
            read_bytes: sum("read", "bw_bytes"),
            write_bytes: sum("write", "bw_bytes"),
            mean_ns: per_io(total_ns.sum()),
            p50_ns: quantile(&latencies, 0.50),
            p99_ns: quantile(&latencies, 0.99),
            guest_user_ns: guest(&["user"]),
            guest_system_ns: guest(&["system"]),
            guest_irq_ns: guest(&["irq", "softirq"]),
            host_ns: host_ns(&document["vm"]["host_cpu_ns"], way).map(per_io),
            load: Disturbance::default(),
        }
    }
}

/// CPU time of the host's processes for a way; `None` if that of one process is unknown.
fn host_ns(host: &Value, way: &DiskRoute) -> Option<f64> {
    match &way.words {
        None => host["generator"].as_f64(),
        Some(words) if words.contains("via=qemu") => host["qemu"].as_f64(),
        Some(_) => Some(host["qemu"].as_f64()? + host["daemon"].as_f64()?),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn way(words: Option<&str>) -> DiskRoute {
        DiskRoute::new("w".to_owned(), words.map(str::to_owned), 2)
    }

    fn case() -> Case {
        Case {
            name: "c".to_owned(),
            pattern: "randread".to_owned(),
            reads: 100,
            depth: 1,
            block_size: "4k".to_owned(),
            files: None,
            job_file: None,
        }
    }

    /// A fast disk with 990 requests and a slow one with 10: the slow requests are the last hundredth. The disks are not
    /// averaged.
    fn two_disks() -> Value {
        let side = |ios: u64, nanos: u64| {
            json!({"total_ios": ios, "iops": ios, "lat_ns": {"mean": nanos},
                "clat_ns": {"bins": {nanos.to_string(): ios}}})
        };
        let nothing = json!({"total_ios": 0, "iops": 0.0, "lat_ns": {"mean": 0.0}, "clat_ns": {}});
        json!({"jobs": [{"read": side(990, 1000), "write": nothing}, {"read": side(10, 1_000_000), "write": nothing}],
            "vm": {"guest_cpu_ns": {"user": 5_000}, "host_cpu_ns": {"qemu": 2_000_000, "daemon": null}}})
    }

    #[test]
    fn percentiles_are_of_all_requests_of_all_disks() {
        let run = Run::of(&two_disks(), &way(Some("blk:2,via=qemu")), &case(), 0);
        assert_eq!((run.p50_ns, run.p99_ns), (1000.0, 1000.0));
        assert!((run.mean_ns - 10_990.0).abs() < 1e-6, "{}", run.mean_ns);
        assert_eq!(
            quantile(&BTreeMap::from([(1000, 990), (1_000_000, 10)]), 0.995),
            1_000_000.0
        );
        assert_eq!(quantile(&BTreeMap::new(), 0.5), 0.0);
    }

    #[test]
    fn cpu_time_that_is_not_known_is_not_nothing() {
        let of = |words| Run::of(&two_disks(), &way(words), &case(), 0).host_ns;
        assert_eq!(of(Some("blk:2,via=qemu")), Some(2000.0));
        assert_eq!(of(Some("blk:2")), None, "unknown for the daemon");
        assert_eq!(of(None), None, "unknown for the generator");
    }
}
