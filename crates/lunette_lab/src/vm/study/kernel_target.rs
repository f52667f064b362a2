//! The series `vhost-scsi`: disks of a target in the host's kernel, which the study creates and removes.

use std::path::PathBuf;

use anyhow::Result;
use bench::study::Variant;
use vm::vhost_scsi::{Storage, Target, wwpn};

use super::engine::{DiskFiles, Study};
use super::{DiskRoute, Setup};

/// Word of the series.
pub const VHOST_SCSI: &str = "vhost-scsi";

impl DiskRoute {
    /// Creates a route through a target in the host's kernel. `options` are those of the controller, each after a comma.
    pub fn of_kernel(variant: Variant, folder: &str, disks: u32, options: &str) -> DiskRoute {
        // The same in each run, because an interrupted study continues only with the same words.
        let wwpn = wwpn(&format!("{folder} {}", variant.name));
        DiskRoute {
            variant,
            words: Some(format!(
                "scsi:1x{disks}{options},via={VHOST_SCSI},wwpn={wwpn}"
            )),
            disks,
            wwpn: Some(wwpn),
        }
    }
}

/// Removes the routes through the host's kernel if `check` fails. Returns the reason.
pub fn leave_out(setups: &mut Vec<Setup>, check: impl Fn() -> Result<()>) -> Option<String> {
    let is_of_kernel = |way: &DiskRoute| way.wwpn.is_some();
    if !setups
        .iter()
        .flat_map(|setup| &setup.ways)
        .any(is_of_kernel)
    {
        return None;
    }
    let error = check().err()?;
    for setup in setups.iter_mut() {
        setup.ways.retain(|way| !is_of_kernel(way));
    }
    setups.retain(|setup| !setup.ways.is_empty());
    Some(format!("left out: {VHOST_SCSI}: {error:#}"))
}

impl Study {
    /// Creates the targets of a setup, and their files unless the study has block devices.
    pub fn targets(&self, setup: &Setup, files: &mut DiskFiles) -> Result<Vec<Target>> {
        let ways = setup.ways.iter();
        let ways = ways.filter_map(|way| Some((way.wwpn.as_ref()?, way.disks)));
        let target = |(wwpn, disks): (&String, u32)| {
            let storages: Vec<Storage> = match self.devices.as_slice() {
                [] => {
                    let paths = (0..disks).map(|number| self.kernel_file(wwpn, number));
                    let paths: Vec<PathBuf> = paths.collect();
                    for path in &paths {
                        files.add(path, self.size, self.content)?;
                    }
                    let storage = |path| Storage::File {
                        path,
                        size: self.size,
                        is_direct: self.direct,
                    };
                    paths.into_iter().map(storage).collect()
                }
                devices => devices.iter().cloned().map(Storage::Block).collect(),
            };
            Target::create(wwpn, &storages)
        };
        ways.map(target).collect()
    }

    /// Path of the file of a disk. Disks in memory are on tmpfs, which has no direct I/O.
    fn kernel_file(&self, wwpn: &str, number: u32) -> PathBuf {
        let folder = match self.direct {
            true => self.folder.clone(),
            false => PathBuf::from("/dev/shm"),
        };
        folder.join(format!("{wwpn}-{number}.raw"))
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::super::matrix::MatrixArguments;
    use super::super::series;
    use super::*;

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        arguments: MatrixArguments,
    }

    #[test]
    fn the_matrix_has_the_kernels_disks_in_the_guest_without_threads() {
        let words = "matrix --disks 3 --threads 0,1 --queues 1,2 --baseline vhost-scsi";
        let words = <Words as clap::Parser>::parse_from(words.split(' '));
        let ways = || {
            let setups = series::setups(&words.arguments, &[0, 1], "/srv/matrix");
            let ways = |setup: Setup| {
                let kernel = setup.ways.into_iter().filter(|way| way.wwpn.is_some());
                kernel.map(|way| (way.variant.name, way.words.unwrap()))
            };
            let ways = setups.into_iter().map(|setup| ways(setup).collect());
            ways.collect::<Vec<Vec<(String, String)>>>()
        };
        let [first, second] = &ways()[..] else {
            panic!("two guests");
        };
        assert!(second.is_empty());
        let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
        let name = "LIO vhost-scsi, kernel threads";
        assert_eq!(
            names,
            [format!("{name}, 1 queue"), format!("{name}, 2 queues")]
        );
        assert!(
            first[1]
                .1
                .starts_with("scsi:1x3,queues=2,via=vhost-scsi,wwpn=naa.")
        );
        let words: Vec<&str> = first.iter().map(|(_, words)| words.as_str()).collect();
        // A target serves one controller.
        vm::topology::Topology::parse(&words).unwrap();
        assert_eq!(ways()[0], *first);
    }

    fn setups() -> Vec<Setup> {
        let route = |name: &str| DiskRoute::new(name.to_owned(), Some("blk:1".to_owned()), 1);
        let variant = route("LIO").variant;
        let kernel = DiskRoute::of_kernel(variant, "/srv/matrix", 4, ",queues=2");
        let setup = |ways| Setup {
            name: "guest".to_owned(),
            options: Vec::new(),
            ways,
        };
        vec![
            setup(vec![route("Lunette"), kernel.clone()]),
            setup(vec![kernel]),
        ]
    }

    #[test]
    fn a_host_without_the_module_leaves_the_series_out() {
        let mut usable = setups();
        assert_eq!(leave_out(&mut usable, || Ok(())), None);
        let words = usable[1].ways[0].words.clone().unwrap();
        assert!(words.starts_with("scsi:1x4,queues=2,via=vhost-scsi,wwpn=naa.5001405"));
        vm::topology::Topology::parse(&[words]).unwrap();

        let mut refused = setups();
        let reason = leave_out(&mut refused, || {
            bail!("no module; hint: modprobe vhost_scsi")
        });
        let wanted = "left out: vhost-scsi: no module; hint: modprobe vhost_scsi";
        assert_eq!(reason.as_deref(), Some(wanted));
        let names = refused.iter().flat_map(|setup| &setup.ways);
        let names: Vec<&str> = names.map(|way| way.variant.name.as_str()).collect();
        assert_eq!(names, ["Lunette"]);
        assert_eq!(refused.len(), 1);
        let unasked = || -> Result<()> { panic!("no such series") };
        assert_eq!(leave_out(&mut refused, unasked), None);
    }
}
