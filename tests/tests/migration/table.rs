//! Tables of the measurements of a test: times of queue stops, and growth of the daemons.

use super::{Resources, Sides};
use control::statistics::Statistics;
use end_to_end::{Context, Result, Rig, ensure};
use latency::SparseHistogram;

/// Prints the queue stops of each export. Counterparts of both sides share a row.
pub fn print_stops(sides: &Sides, rigs: &[&mut Rig], migrations: usize) -> Result<()> {
    let statistics = |rig: &&mut Rig| control::get(&rig.daemon.control(), "/v1/statistics");
    let times = rigs.iter().map(|rig| Ok(statistics(rig)?));
    let times = times.collect::<Result<Vec<Statistics>>>()?;
    println!(
        "| disk, device, ring | migrations | stops | stop: median | p99 | maximum | without drain: median | p99 | maximum |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (index, kind) in sides.kinds.iter().enumerate() {
        let (mut stop, mut rest) = (SparseHistogram::default(), SparseHistogram::default());
        for (side, sockets) in sides.sockets.iter().enumerate() {
            let name = sockets[index].file_stem().and_then(|name| name.to_str());
            let known = &times[side % times.len()].queue_times;
            let known = known.iter().find(|times| name == Some(&times.export));
            let known = known.with_context(|| format!("{kind}: no times of {name:?}"))?;
            stop.merge(&known.stop);
            rest.merge(&known.rest);
        }
        ensure!(!stop.is_empty(), "{kind} has not stopped");
        let (count, stop, rest) = (stop.count, quantiles(&stop), quantiles(&rest));
        println!("| {kind} | {migrations} | {count} | {stop} | {rest} |");
    }
    Ok(())
}

/// Returns median, 99th percentile and maximum in milliseconds.
fn quantiles(times: &SparseHistogram) -> String {
    let [median, p99] = [0.5, 0.99].map(|q| times.quantile_ns(q));
    let all = [median, p99, times.max_ns].map(|ns| format!("{:.2} ms", ns as f64 / 1e6));
    all.join(" | ")
}

/// Prints the resources of each daemon after the second and after the last migration.
pub fn print_growth(pairs: &[(Resources, Resources)]) {
    println!("| daemon | descriptors | heap in KiB | mapped memory of guests in MiB |");
    println!("|---|---|---|---|");
    for (number, (before, after)) in (1..).zip(pairs) {
        let row = |of: fn(&Resources) -> u64| format!("{}, {}", of(before), of(after));
        println!(
            "| {number} | {} | {} | {} |",
            row(|one| one.descriptors as u64),
            row(|one| one.heap_kib),
            row(|one| one.mapped >> 20),
        );
    }
}
