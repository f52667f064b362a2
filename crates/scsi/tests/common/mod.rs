//! A miniature daemon: disks in memory, and execution of plans on them.

#![allow(dead_code, missing_docs)]

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use block::{
    COMMAND_HEADER, DiskInfo, Extent, Geometry, IoError, IoErrorKind, IoKind, IoOutcome, IoRequest,
    ScsiAnswer, ScsiCommand,
};
use scsi::*;

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// End of the validity of shared state, unless a test sets another.
pub const VALID: Duration = Duration::from_secs(12);

/// Returns the time of the test on this thread.
pub fn now() -> Duration {
    NOW.get()
}

pub fn set_now(now: Duration) {
    NOW.set(now);
}

pub fn info(block_size: u32, blocks: u64, number: u64) -> DiskInfo {
    DiskInfo {
        geometry: Geometry::new(block_size, blocks * u64::from(block_size)),
        physical_block_size: 4096,
        io_alignment: block_size,
        optimal_io_size: 65536,
        read_only: false,
        write_cache: true,
        discard_granularity: Some(4096),
        discard_zeroes: true,
        write_zeroes: true,
        anchors: true,
        atomic_writes: None,
        compare_and_write: Some(block::CompareAndWrite::Emulated),
        shared: false,
        rotational: false,
        passthrough: None,
        identity: block::Identity::from_random_bits(number.into()),
        serial: format!("serial-{number}"),
        naa: 0x3000_0000_0000_0000 | number,
    }
}

pub fn port(relative_id: u16) -> Arc<TargetPort> {
    let name = Some(format!("iqn.2026-11.org.example:t0,t,0x{relative_id:04x}"));
    let device_name = Some("iqn.2026-11.org.example:t0".to_owned());
    Arc::new(TargetPort {
        relative_id,
        group: 1,
        name,
        device_name,
        state_setters: StateSetters::default(),
    })
}

pub fn initiator(number: u8) -> TransportId {
    TransportId::iscsi_port("iqn.2026-11.org.example:i", [0x40, 0, 0, 0, 0, number])
}

/// Result of a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: Status,
    pub sense: Vec<u8>,
    pub data: Vec<u8>,
    pub residual: Residual,
}

impl Answer {
    /// Returns sense key, ASC and ASCQ, from either format.
    pub fn code(&self) -> (u8, u8, u8) {
        match self.sense.first() {
            Some(0x70) | Some(0xf0) => (self.sense[2] & 0x0f, self.sense[12], self.sense[13]),
            Some(0x72) => (self.sense[1] & 0x0f, self.sense[2], self.sense[3]),
            _ => (0, 0, 0),
        }
    }
}

/// Disks in memory, with a log of their requests.
#[derive(Default)]
pub struct Disks {
    pub bytes: Vec<Vec<u8>>,
    pub log: Vec<(DiskId, IoRequest)>,
    /// Error of the next I/O.
    pub failure: Option<IoErrorKind>,
    /// Returns the extent at an offset; without it no disk reports extents.
    pub extents: Option<fn(u64) -> Extent>,
    /// State shared with other beds, as between daemons that serve one image.
    pub shared: Option<Arc<SharedState>>,
    /// Device that executes pass-through commands.
    pub device: Option<Device>,
}

/// A SCSI device: receives a command with its data-out, and returns a response with its data-in.
pub type Device = Box<dyn FnMut(ScsiCommand, &[u8]) -> Result<(ScsiAnswer, Vec<u8>), IoErrorKind>>;

fn pass_through(device: &mut Device, buffer: &mut [u8]) -> IoOutcome {
    let header = buffer.first_chunk().unwrap();
    let command = ScsiCommand::decode(header, buffer.len() as u64).unwrap();
    let data_out = &buffer[COMMAND_HEADER..][..command.data_out as usize];
    let (answer, data) = device(command, data_out)?;
    let answer = ScsiAnswer {
        data_in: data.len() as u32,
        ..answer
    }
    .encode();
    buffer[ScsiAnswer::OFFSET..][..answer.len()].copy_from_slice(&answer);
    buffer[COMMAND_HEADER..][..data.len()].copy_from_slice(&data);
    Ok(())
}

/// State shared by units of several beds. Each of them adopts it before a replacement ends.
#[derive(Default)]
pub struct SharedState(Mutex<StoredState>);

#[derive(Default)]
struct StoredState {
    version: u64,
    state: Vec<u8>,
    units: Vec<Arc<LogicalUnit>>,
    aborts: Vec<AbortScope>,
}

impl SharedState {
    /// Adds the unit at LUN 0 of a bed, in the daemon with this number.
    pub fn join(self: &Arc<Self>, bed: &mut Bed, daemon: u128) {
        let unit = bed.unit(0);
        unit.share_reservations(daemon, now);
        unit.set_reservations_valid_until(VALID);
        let mut shared = self.0.lock().unwrap();
        unit.adopt_reservations(shared.version, &shared.state)
            .unwrap();
        unit.set_reservations_current(true);
        shared.units.push(unit);
        bed.disks.shared = Some(Arc::clone(self));
    }

    fn replace(&self, buffer: &[u8]) -> IoOutcome {
        let mut shared = self.0.lock().unwrap();
        let (version, state) = buffer.split_first_chunk::<8>().unwrap();
        if u64::from_be_bytes(*version) != shared.version {
            return Err(IoErrorKind::Miscompare.into());
        }
        shared.version = shared.version.wrapping_add(1);
        shared.state = state.to_vec();
        let StoredState {
            version,
            state,
            units,
            aborts,
        } = &mut *shared;
        for unit in units {
            aborts.extend(unit.adopt_reservations(*version, state).unwrap());
        }
        Ok(())
    }

    /// Sets the state as if another daemon had replaced it; the beds are not notified.
    pub fn set(&self, version: u64, state: &[u8]) {
        let mut shared = self.0.lock().unwrap();
        (shared.version, shared.state) = (version, state.to_vec());
    }

    /// Returns version and state.
    pub fn get(&self) -> (u64, Vec<u8>) {
        let shared = self.0.lock().unwrap();
        (shared.version, shared.state.clone())
    }

    /// Returns the abort scopes since the last call.
    pub fn take_aborts(&self) -> Vec<AbortScope> {
        std::mem::take(&mut self.0.lock().unwrap().aborts)
    }
}

impl Disks {
    pub fn io(&mut self, disk: DiskId, request: IoRequest, buffer: &mut [u8]) -> IoOutcome {
        if request.kind == IoKind::BlockStatus {
            let Some(extents) = self.extents else {
                return Err(IoErrorKind::Unsupported.into());
            };
            let range = request.offset..request.offset + request.length;
            buffer.copy_from_slice(&block::encode_extents(range, extents));
            return Ok(());
        }
        self.log.push((disk, request));
        if let Some(kind) = self.failure.take() {
            return Err(IoError::new(kind));
        }
        if request.kind == IoKind::ScsiCommand {
            assert_eq!(buffer.len() as u64, request.length);
            return match &mut self.device {
                Some(device) => pass_through(device, buffer),
                None => Err(IoErrorKind::Unsupported.into()),
            };
        }
        if request.kind == IoKind::ReplaceState {
            assert_eq!(buffer.len() as u64, request.length);
            return match &self.shared {
                Some(shared) => shared.replace(buffer),
                None => Err(IoErrorKind::Unsupported.into()),
            };
        }
        let bytes = &mut self.bytes[disk.0 as usize];
        let range = request.offset as usize..(request.offset + request.length) as usize;
        match request.kind {
            IoKind::Read => buffer.copy_from_slice(&bytes[range]),
            IoKind::Write => bytes[range].copy_from_slice(buffer),
            IoKind::Flush | IoKind::BlockStatus => {}
            IoKind::Discard | IoKind::WriteZeroes => bytes[range].fill(0),
            IoKind::CompareAndWrite => {
                let (compared, written) = buffer.split_at(buffer.len() / 2);
                if bytes[range.clone()] != *compared {
                    return Err(IoErrorKind::Miscompare.into());
                }
                bytes[range].copy_from_slice(written);
            }
            IoKind::ReplaceState | IoKind::ScsiCommand => {}
        }
        Ok(())
    }
}

pub struct Bed {
    pub directory: Arc<Directory>,
    pub target: Arc<Target>,
    pub nexus: Arc<Nexus>,
    pub disks: Disks,
    pub shutter: Arc<Shutter>,
}

/// Records if the units have closed their disks.
#[derive(Debug, Default)]
pub struct Shutter(AtomicBool);

impl Shutter {
    pub fn is_closed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Medium for Shutter {
    fn set_closed(&self, closed: bool) {
        self.0.store(closed, Ordering::Relaxed);
    }
}

impl Bed {
    /// Creates a target with one disk at LUN 0 and a nexus, and clears its power on unit attention.
    pub fn new(block_size: u32, blocks: u64) -> Bed {
        Bed::with(info(block_size, blocks, 0), false)
    }

    pub fn with(info: DiskInfo, removable: bool) -> Bed {
        Bed::over(
            Directory::new(Box::<MemoryStore>::default()),
            info,
            removable,
        )
    }

    /// Like [`Bed::new`], on a directory with a store that may have been used before.
    pub fn over(directory: Arc<Directory>, info: DiskInfo, removable: bool) -> Bed {
        let target = Target::new(vec![port(1)]);
        let nexus = target.attach_nexus(initiator(1), port(1));
        let mut bed = Bed {
            directory,
            target,
            nexus,
            disks: Disks::default(),
            shutter: Arc::default(),
        };
        bed.add(0, info, removable);
        bed.run(0, &[0x00, 0, 0, 0, 0, 0], &[], 0);
        bed
    }

    pub fn add(&mut self, lun: u16, info: DiskInfo, removable: bool) -> Arc<LogicalUnit> {
        let disk = DiskId(self.disks.bytes.len() as u32);
        self.disks
            .bytes
            .push(vec![0; info.geometry.capacity_bytes() as usize]);
        let unit = LogicalUnit::new(
            &self.directory,
            UnitConfig {
                disk,
                info,
                removable,
                medium: Some(self.shutter.clone()),
            },
        );
        self.target.attach_unit(lun, Arc::clone(&unit)).unwrap();
        unit
    }

    pub fn unit(&self, lun: u16) -> Arc<LogicalUnit> {
        Arc::clone(self.target.view().unit(Lun::unit(lun)).unwrap())
    }

    /// Creates another nexus and clears its power on unit attentions at LUN 0.
    pub fn other_nexus(&mut self, number: u8) -> Arc<Nexus> {
        let nexus = self.target.attach_nexus(initiator(number), port(1));
        self.run_as(&nexus, 0, &[0x00, 0, 0, 0, 0, 0], &[], 0);
        nexus
    }

    pub fn run(&mut self, lun: u16, cdb: &[u8], data_out: &[u8], data_in: usize) -> Answer {
        let nexus = Arc::clone(&self.nexus);
        self.run_as(&nexus, lun, cdb, data_out, data_in)
    }

    pub fn run_as(
        &mut self,
        nexus: &Arc<Nexus>,
        lun: u16,
        cdb: &[u8],
        data_out: &[u8],
        data_in: usize,
    ) -> Answer {
        self.run_lun(nexus, Lun::unit(lun), cdb, data_out, data_in)
    }

    pub fn run_lun(
        &mut self,
        nexus: &Arc<Nexus>,
        lun: Lun,
        cdb: &[u8],
        data_out: &[u8],
        data_in: usize,
    ) -> Answer {
        let simple = TaskAttribute::Simple;
        self.run_task(nexus, lun, simple, cdb, data_out, data_in)
    }

    pub fn run_task(
        &mut self,
        nexus: &Arc<Nexus>,
        lun: Lun,
        attribute: TaskAttribute,
        cdb: &[u8],
        data_out: &[u8],
        data_in: usize,
    ) -> Answer {
        let view = self.target.view();
        let plan = view.begin(&Command {
            nexus,
            lun,
            cdb,
            attribute,
            data_out_length: data_out.len() as u64,
            data_in_length: data_in as u64,
        });
        self.carry_out(plan, data_out, data_in)
    }

    pub fn carry_out(&mut self, plan: Plan, data_out: &[u8], data_in: usize) -> Answer {
        match plan {
            Plan::Done(response) => answer(response),
            Plan::Io(io) => {
                let length = io.request.length as usize;
                let mut buffer = Vec::new();
                match io.request.kind {
                    IoKind::Read => {
                        assert!(length <= data_in, "read beyond the initiator's buffer");
                        buffer = vec![0; length];
                    }
                    IoKind::Write => buffer = data_out[..length].to_vec(),
                    _ => {}
                }
                let outcome = self.disks.io(io.disk, io.request, &mut buffer);
                let mut answer = answer(io.finish(outcome));
                if outcome.is_ok() && io.request.kind == IoKind::Read {
                    answer.data = buffer;
                }
                answer
            }
            Plan::NeedData(pending) => {
                let length = pending.length();
                assert!(length <= DATA_OUT_MAX && length <= data_out.len());
                let plan = pending.with_data(data_out[..length].to_vec());
                self.carry_out(plan, data_out, data_in)
            }
            Plan::Run(mut run) => {
                let most = SCRATCH_MAX.max(block::COMMAND_HEADER + PASSED_MAX as usize);
                assert!(run.scratch_length <= most);
                let mut scratch = vec![0; run.scratch_length];
                let mut last = None;
                let mut answered = None;
                loop {
                    match run.next(last.take(), &mut scratch) {
                        PlanStep::Io {
                            disk,
                            request,
                            scratch: range,
                        } => {
                            if request.moves_data() {
                                assert_eq!(range.len() as u64, request.length);
                            }
                            last = Some(self.disks.io(disk, request, &mut scratch[range]));
                        }
                        PlanStep::Done(response) => return answer(response),
                        PlanStep::Answer(response) => answered = Some(answer(response)),
                        PlanStep::End => return answered.expect("an answer comes before the end"),
                    }
                }
            }
        }
    }
}

fn answer(response: Response) -> Answer {
    let sense = response.sense_data().to_vec();
    assert_eq!(response.status == Status::CheckCondition, !sense.is_empty());
    Answer {
        status: response.status,
        sense,
        data: response.data,
        residual: response.residual,
    }
}
