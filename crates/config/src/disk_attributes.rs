//! Keys of a disk that say what its clients see, and how much of it they may have in a second.

use super::diagnostics::{Mistake, MistakeKind};
use super::model::{LimitsConfig, ShownConfig};
use super::place::At;
use super::size::parse_size;
use super::value::{Raw, Reader};

const WWN_ALLOWED: &str =
    "16 hexadecimal digits, the first 2, 3 or 5, such as \"3a5b000000000001\"";
const PHYSICAL_MAX: u32 = 65_536;

/// What is said of it; the identifier with its place, for no two disks may have one.
pub fn read_shown(
    reader: &mut Reader<'_, '_>,
    block_size: Option<u32>,
) -> (Option<At<u64>>, ShownConfig) {
    let wwn = read_wwn(reader);
    let shown = ShownConfig {
        wwn: wwn.as_ref().map(|at| at.value),
        physical_block_size: read_physical_block_size(reader, block_size),
        removable: reader.boolean("removable").is_some_and(|at| at.value),
        copy_across_targets: reader
            .boolean("copy_across_targets")
            .is_some_and(|at| at.value),
    };
    (wwn, shown)
}

/// NAA identifiers of 64 bits, as `lsblk`, udev and initiators print them: also with `naa.` or `0x` before.
fn read_wwn(reader: &mut Reader<'_, '_>) -> Option<At<u64>> {
    let value = reader.raw("wwn")?;
    let text = match &value.value {
        Raw::Text(text) | Raw::Word(text) => text.as_str(),
        _ => "",
    };
    let digits = ["naa.", "0x"]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    let all_hexadecimal = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    match u64::from_str_radix(digits, 16) {
        Ok(wwn) if all_hexadecimal && matches!(wwn >> 60, 2 | 3 | 5) => {
            Some(At::new(wwn, value.place.clone()))
        }
        _ => {
            reader.refuse("wwn", value, WWN_ALLOWED);
            None
        }
    }
}

fn read_physical_block_size(reader: &mut Reader<'_, '_>, block_size: Option<u32>) -> Option<u32> {
    let value = reader.raw("physical_block_size")?;
    let read = match &value.value {
        Raw::Integer(number) => u32::try_from(*number).ok(),
        Raw::Text(word) | Raw::Word(word) => {
            parse_size(word).ok().and_then(|n| u32::try_from(n).ok())
        }
        _ => None,
    };
    let least = block_size.unwrap_or(512);
    match read {
        Some(size) if size.is_power_of_two() && (least..=PHYSICAL_MAX).contains(&size) => {
            Some(size)
        }
        _ => {
            let allowed = format!("a power of two from {least}, the block size, to {PHYSICAL_MAX}");
            reader.refuse("physical_block_size", value, &allowed);
            None
        }
    }
}

/// Most requests in a second that a limit may say: more than any disk does.
const IOPS_MAX: u64 = 1_000_000_000;

/// Its limits. A burst without its rate is a mistake: it would mean nothing.
pub fn read_limits(reader: &mut Reader<'_, '_>) -> LimitsConfig {
    let iops = reader.number("iops", 1..=IOPS_MAX);
    let iops_burst = reader.number("iops_burst", 1..=IOPS_MAX);
    let bandwidth = reader.size("bandwidth");
    let bandwidth_burst = reader.size("bandwidth_burst");
    let pairs = [
        ("iops_burst", "iops", &iops_burst, &iops),
        ("bandwidth_burst", "bandwidth", &bandwidth_burst, &bandwidth),
    ];
    for (burst_key, rate_key, burst, rate) in pairs {
        if let (Some(burst), None) = (burst, rate) {
            let message = format!("`{burst_key}` needs `{rate_key}`");
            let mistake = Mistake::new(MistakeKind::Relation, &burst.place, message);
            let help = format!("add `{rate_key}`, or remove `{burst_key}`");
            reader.diagnostics().push(mistake.help(help));
        }
    }
    for (key, at) in [
        ("bandwidth", &bandwidth),
        ("bandwidth_burst", &bandwidth_burst),
    ] {
        if let Some(at) = at
            && at.value == 0
        {
            let message = format!("`{key}`: found 0");
            let mistake = Mistake::new(MistakeKind::Value, &at.place, message);
            let help = "to remove the limit, remove the key";
            reader.diagnostics().push(mistake.help(help));
        }
    }
    LimitsConfig {
        iops: iops.map(|at| at.value),
        iops_burst: iops_burst.map(|at| at.value),
        bandwidth: bandwidth.map(|at| at.value),
        bandwidth_burst: bandwidth_burst.map(|at| at.value),
    }
}
