//! Text of a job file, with options that override it for all jobs.

/// Parses `OPTION=VALUE` of the command line.
pub fn option(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((option, value)) if !option.trim().is_empty() => {
            Ok((option.trim().to_owned(), value.trim().to_owned()))
        }
        _ => Err("expected OPTION=VALUE, such as ramp_time=0".to_owned()),
    }
}

/// Value of `filename` for disks: names are those in /dev, and a colon in a name is written `\:`.
pub fn filename(disks: &[String]) -> String {
    let paths = disks.iter().map(|disk| {
        let path = match disk.starts_with('/') {
            true => disk.clone(),
            false => format!("/dev/{disk}"),
        };
        path.replace(':', "\\:")
    });
    paths.collect::<Vec<_>>().join(":")
}

/// Returns the paths in /dev that the jobs use as files. Files in /dev/shm are no devices.
pub fn devices(text: &str) -> Vec<String> {
    let options = text.lines().filter_map(|line| line.trim().split_once('='));
    let names = options.filter(|(option, _)| option.trim() == "filename");
    let paths = names.flat_map(|(_, value)| {
        // A colon in a name is written `\:`.
        let value = value.trim().replace("\\:", "\0");
        let paths = value.split(':').map(|path| path.replace('\0', ":"));
        paths.collect::<Vec<_>>()
    });
    let paths = paths.filter(|path| path.starts_with("/dev/") && !path.starts_with("/dev/shm/"));
    paths.collect()
}

/// Returns a job file with these disks in place of its devices, in the order of their first use, without the logs that it asks for.
///
/// # Errors
/// For a different number of devices.
pub fn for_disks(text: &str, disks: &[String]) -> Result<String, String> {
    let mut known: Vec<String> = Vec::new();
    for device in devices(text) {
        if !known.contains(&device) {
            known.push(device);
        }
    }
    if known.len() != disks.len() {
        return Err(format!(
            "the job file uses {} devices, but there are {} disks; hint: --disks {}",
            known.len(),
            disks.len(),
            known.len()
        ));
    }
    let line = |line: &str| {
        if line.trim().split('=').next().map(str::trim) != Some("filename") {
            return line.to_owned();
        }
        let places = devices(line);
        let places = places
            .iter()
            .filter_map(|device| known.iter().position(|other| other == device));
        let places: Vec<String> = places.map(|at| disks[at].clone()).collect();
        format!("filename={}", filename(&places))
    };
    let is_log = |line: &&str| line.trim().starts_with("write_") && line.contains("_log");
    let lines = text.lines().filter(|line| !is_log(line)).map(line);
    Ok(lines.map(|line| line + "\n").collect())
}

/// Removes each line that sets one of these options, and sets them for all jobs at the beginning.
///
/// # Errors
/// For a file that includes others, which are not in the guest.
pub fn with_overrides(text: &str, overrides: &[(String, String)]) -> Result<String, String> {
    let mut lines = Vec::new();
    if !overrides.is_empty() {
        lines.push("[global]".to_owned());
        let given = overrides.iter();
        lines.extend(given.map(|(option, value)| format!("{option}={value}")));
    }
    for (line, number) in text.lines().zip(1..) {
        let bare = line.trim();
        if bare.split_whitespace().next() == Some("include") {
            return Err(format!(
                "line {number}: `{bare}`: the guest has no access to other files; hint: insert the text of that file"
            ));
        }
        let option = bare.split('=').next().unwrap_or_default().trim();
        if !overrides.iter().any(|(name, _)| name == option) {
            lines.push(line.to_owned());
        }
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(list: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(a, b): &(&str, &str)| ((*a).to_owned(), (*b).to_owned());
        list.iter().map(owned).collect()
    }

    #[test]
    fn overrides_count_whatever_the_file_says() {
        let text = "; size=1g\n[global]\nsize = 512m\nbs=4k\n[a]\nloops=10\nfilename=/dev/sda\n";
        let new = with_overrides(text, &overrides(&[("size", "1m"), ("loops", "2")])).unwrap();
        assert_eq!(
            new,
            "[global]\nsize=1m\nloops=2\n; size=1g\n[global]\nbs=4k\n[a]\nfilename=/dev/sda\n"
        );
        assert_eq!(with_overrides(text, &[]).unwrap(), text);
    }

    #[test]
    fn a_file_that_includes_another_is_refused() {
        let error = with_overrides("[a]\n include more.fio\n", &[]).unwrap_err();
        assert!(error.starts_with("line 2:"), "{error}");
    }

    #[test]
    fn devices_are_paths_in_dev() {
        let text = "[a]\nfilename=/dev/sda:/dev/disk/pci-0\\:1\nfilename = /dev/vda\n[b]\nfilename=/dev/shm/x:y\n";
        assert_eq!(devices(text), ["/dev/sda", "/dev/disk/pci-0:1", "/dev/vda"]);
    }

    #[test]
    fn devices_of_a_job_file_are_replaced_in_their_order() {
        let text = "[a]\nwrite_bw_log=x\nfilename=/dev/sda:/dev/sdb\n[b]\nfilename = /dev/sdb\n";
        let disks = ["/dev/vdc".to_owned(), "/dev/vda".to_owned()];
        assert_eq!(
            for_disks(text, &disks).unwrap(),
            "[a]\nfilename=/dev/vdc:/dev/vda\n[b]\nfilename=/dev/vda\n"
        );
        let error = for_disks(text, &disks[..1]).unwrap_err();
        assert!(error.ends_with("hint: --disks 2"), "{error}");
    }

    #[test]
    fn disks_are_names_or_paths() {
        let disks = ["vda".to_owned(), "/dev/disk/by-path/pci-0:1".to_owned()];
        assert_eq!(filename(&disks), "/dev/vda:/dev/disk/by-path/pci-0\\:1");
        assert_eq!(option("a = b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(option("a").is_err() && option("=a").is_err());
    }
}
