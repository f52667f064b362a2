//! A plan as a QEMU command line.

use super::options::PlanOptions;
use super::plan::{DiskDevice, Medium, Plan, PlannedDevice, PlannedDisk};
use super::text::{qemu_value, shell_command, shell_word};
use super::words::Via;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Name of the program.
pub const QEMU: &str = "qemu-system-x86_64";

/// Properties in output order.
type Properties = Vec<(String, String)>;

/// Formats a device with its properties for `-device`.
fn device(driver: &str, properties: Properties) -> String {
    let properties = properties.iter();
    let properties = properties.map(|(key, value)| format!(",{key}={}", qemu_value(value)));
    format!("{driver}{}", properties.collect::<String>())
}

fn property(key: &str, value: impl ToString) -> (String, String) {
    (key.to_owned(), value.to_string())
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}

impl Plan {
    /// Returns QEMU's arguments, without the program.
    pub fn qemu_arguments(&self) -> Vec<String> {
        let mut arguments = machine(
            &self.options,
            self.needs_daemon() || self.options.is_memory_shared,
        );
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        for port in &self.ports {
            let (driver, properties) = port.device();
            add("-device", device(driver, properties));
        }
        let threads = self.devices.iter().flat_map(|device| &device.iothreads);
        let threads = self.options.iothreads.iter().chain(threads);
        let mut added = BTreeSet::new();
        for thread in threads.filter(|thread| added.insert(*thread)) {
            add("-object", format!("iothread,id={thread}"));
        }
        for (index, planned) in self.devices.iter().enumerate() {
            for (option, value) in self.device_arguments(index, planned) {
                add(option, value);
            }
        }
        arguments.extend(self.options.console.iter().cloned());
        arguments.extend(boot(&self.options));
        arguments.extend(self.options.extra.iter().cloned());
        arguments
    }

    /// Returns the command line for a shell, after the commands that create the required files.
    pub fn qemu_text(&self) -> String {
        let files = self.files_of_qemu().into_iter().map(|(path, size)| {
            let path = shell_word(&path.display().to_string());
            format!("[ -e {path} ] || truncate -s {size} {path}\n")
        });
        let mut text: String = files.collect();
        let emulator = self.options.emulator.as_deref().unwrap_or(QEMU);
        let mut words = vec![emulator.to_owned()];
        words.extend(self.qemu_arguments());
        text.push_str(&shell_command(&words));
        text
    }

    pub(super) fn device_arguments(
        &self,
        index: usize,
        planned: &PlannedDevice,
    ) -> Vec<(&'static str, String)> {
        let mut arguments = Vec::new();
        if let Some(socket) = &planned.socket {
            arguments.push(("-chardev", self.chardev(planned, socket)));
        }
        let disks: Vec<&PlannedDisk> = self.disks_of(index).collect();
        for disk in disks.iter().filter(|_| planned.via.is_qemu()) {
            arguments.push(("-blockdev", blockdev(planned, disk)));
        }
        arguments.push(("-device", controller(planned, disks.first().copied())));
        let units = disks.iter().filter(|_| planned.via.is_qemu());
        let units = units.filter_map(|disk| match disk.location {
            DiskDevice::Blk { .. } => None,
            DiskDevice::Scsi { target, lun, .. } => Some(scsi_disk(planned, disk, target, lun)),
            DiskDevice::Ata { port, unit, .. } => Some(ata_disk(planned, disk, port, unit)),
        });
        arguments.extend(units.map(|unit| ("-device", unit)));
        arguments
    }

    fn chardev(&self, planned: &PlannedDevice, socket: &Path) -> String {
        let qemu = self.options.qemu;
        let reconnect = match (planned.is_scsi, qemu.is_at_least(9, 2)) {
            (true, _) if !qemu.is_at_least(8, 2) => "",
            (_, true) => ",reconnect-ms=1000",
            (_, false) => ",reconnect=1",
        };
        let path = qemu_value(&socket.display().to_string());
        format!("socket,id={}-socket,path={path}{reconnect}", planned.id)
    }
}

/// Returns the arguments that are not about disks.
fn machine(options: &PlanOptions, is_shared: bool) -> Vec<String> {
    let memory = match options.more_memory_kib {
        0 => format!("{}M", options.memory_mib),
        more => format!(
            "{}K",
            1024 * u64::from(options.memory_mib) + u64::from(more)
        ),
    };
    let mut arguments: Vec<String> = ["-nodefaults", "-no-user-config", "-name"]
        .map(str::to_owned)
        .to_vec();
    arguments.push(options.name.clone());
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    if let Some(uuid) = &options.uuid {
        add("-uuid", uuid.clone());
    }
    let backend = if is_shared { ",memory-backend=mem" } else { "" };
    let acpi = if options.has_acpi { "" } else { ",acpi=off" };
    let name = options.machine_version.as_deref();
    let name = name.unwrap_or(options.machine.word());
    let properties = options.machine_properties.iter();
    let properties: String = properties.map(|property| format!(",{property}")).collect();
    add("-machine", format!("{name}{properties}{acpi}{backend}"));
    for accelerator in &options.accelerators {
        add("-accel", accelerator.clone());
    }
    add("-cpu", options.cpu.clone());
    let topology = options.cpu_topology.iter();
    let topology: String = topology.map(|topology| format!(",{topology}")).collect();
    add("-smp", format!("{}{topology}", options.cpus));
    add("-m", memory.clone());
    if is_shared {
        add(
            "-object",
            format!("memory-backend-memfd,id=mem,size={memory},share=on"),
        );
    }
    arguments.extend(options.settings.iter().cloned());
    arguments
}

fn boot(options: &PlanOptions) -> Vec<String> {
    let mut arguments = Vec::new();
    if let Some(kernel) = &options.kernel {
        arguments.extend(["-kernel".to_owned(), kernel.image.display().to_string()]);
        if let Some(initrd) = &kernel.initrd {
            arguments.extend(["-initrd".to_owned(), initrd.display().to_string()]);
        }
        if !kernel.append.is_empty() {
            arguments.extend(["-append".to_owned(), kernel.append.clone()]);
        }
    }
    arguments
}

/// Returns the device that the guest sees: a virtio-blk disk, a virtio-scsi controller or an ATA controller.
fn controller(planned: &PlannedDevice, disk: Option<&PlannedDisk>) -> String {
    let is_lunette = planned.via == Via::Lunette;
    let driver = match (planned.via, planned.is_scsi) {
        (Via::Ide, _) => return ata_controller("piix3-ide", planned),
        (Via::Ahci, _) => return ata_controller("ich9-ahci", planned),
        (Via::VhostScsi, _) => "vhost-scsi-pci",
        (Via::Lunette, false) => "vhost-user-blk-pci",
        (Via::Lunette, true) => "vhost-user-scsi-pci",
        (Via::Qemu | Via::QemuIothread, false) => "virtio-blk-pci",
        (Via::Qemu | Via::QemuIothread, true) => "virtio-scsi-pci",
    };
    let (queues, queue_size) = match planned.is_scsi {
        true => ("num_queues", "virtqueue_size"),
        false => ("num-queues", "queue-size"),
    };
    let mut properties = vec![property("id", &planned.id)];
    match (is_lunette, planned.is_scsi, disk) {
        (true, _, _) => properties.push(property("chardev", format!("{}-socket", planned.id))),
        (false, false, Some(disk)) => {
            properties.push(property("drive", format!("{}-node", disk.name)));
            if let Some(serial) = &disk.serial {
                properties.push(property("serial", serial));
            }
        }
        _ => {}
    }
    if let Some(wwpn) = &planned.wwpn {
        properties.push(property("wwpn", wwpn));
    }
    if let Some(number) = planned.queues {
        properties.push(property(queues, number));
    }
    if let Some(size) = planned.queue_size {
        properties.push(property(queue_size, size));
    }
    if let Some(commands) = planned.cmd_per_lun {
        properties.push(property("cmd_per_lun", commands));
    }
    if planned.packed {
        properties.push(property("packed", "on"));
    }
    if !planned.indirect {
        properties.push(property("indirect_desc", "off"));
    }
    if let Some(ioeventfd) = planned.ioeventfd {
        properties.push(property("ioeventfd", on_off(ioeventfd)));
    }
    if let (Some(thread), false) = (planned.iothreads.first(), planned.is_mapped) {
        properties.push(property("iothread", thread));
    }
    if planned.boots {
        properties.push(property("bootindex", 1));
    }
    properties.extend(planned.properties.iter().cloned());
    if let (false, Some(disk)) = (planned.is_scsi, disk) {
        properties.extend(disk.properties.iter().cloned());
    }
    properties.extend(planned.address.properties());
    match planned.is_mapped {
        true => mapped(driver, properties, &planned.iothreads),
        false => device(driver, properties),
    }
}

/// Returns a device with queues distributed over threads. Only QEMU's JSON syntax supports that list.
fn mapped(driver: &str, properties: Properties, threads: &[String]) -> String {
    let mut object = Map::new();
    object.insert("driver".to_owned(), json!(driver));
    for (key, value) in properties {
        let value = match value.parse::<u64>() {
            Ok(number) => json!(number),
            Err(_) if value == "on" => Value::Bool(true),
            Err(_) if value == "off" => Value::Bool(false),
            Err(_) => json!(value),
        };
        object.insert(key, value);
    }
    let threads: Vec<Value> = threads
        .iter()
        .map(|thread| json!({"iothread": thread}))
        .collect();
    object.insert("iothread-vq-mapping".to_owned(), Value::Array(threads));
    Value::Object(object).to_string()
}

fn ata_controller(driver: &str, planned: &PlannedDevice) -> String {
    let mut properties = vec![property("id", &planned.id)];
    properties.extend(planned.address.properties());
    device(driver, properties)
}

fn ata_disk(planned: &PlannedDevice, disk: &PlannedDisk, port: u32, unit: u32) -> String {
    let mut properties = vec![
        property("id", &disk.name),
        property("bus", format!("{}.{port}", planned.id)),
        property("unit", unit),
        property("drive", format!("{}-node", disk.name)),
    ];
    if let Some(serial) = &disk.serial {
        properties.push(property("serial", serial));
    }
    device("ide-hd", properties)
}

fn scsi_disk(planned: &PlannedDevice, disk: &PlannedDisk, target: u32, lun: u32) -> String {
    let mut properties = vec![
        property("id", &disk.name),
        property("bus", format!("{}.0", planned.id)),
        property("channel", 0),
        property("scsi-id", target),
        property("lun", lun),
        property("drive", format!("{}-node", disk.name)),
    ];
    if let Some(serial) = &disk.serial {
        properties.push(property("serial", serial));
    }
    if let Some(wwn) = disk.wwn {
        properties.push(property("wwn", format!("0x{wwn:016x}")));
    }
    if disk.removable {
        properties.push(property("removable", "on"));
    }
    properties.extend(disk.properties.iter().cloned());
    device("scsi-hd", properties)
}

/// Returns the block node for a disk of an emulated device.
fn blockdev(planned: &PlannedDevice, disk: &PlannedDisk) -> String {
    let path = disk.medium.path().unwrap_or(Path::new(""));
    let path = qemu_value(&path.display().to_string());
    let is_device = disk.medium.is_device();
    let driver = if is_device { "host_device" } else { "file" };
    let mut settings = Vec::new();
    let mut discard = Some("discard=unmap");
    let mut aio = planned.aio;
    let mut cache = Vec::new();
    if disk.medium.is_direct() {
        cache.push("cache.direct=on");
    }
    if let Medium::Existing { node, .. } = &disk.medium {
        aio = node.aio;
        discard = discard.filter(|_| node.discards);
        if node.ignores_flush {
            cache.push("cache.no-flush=on");
        }
        if node.is_read_only {
            settings.push("read-only=on".to_owned());
        }
        if let Some(detect) = &node.detect_zeroes {
            settings.push(format!("detect-zeroes={detect}"));
        }
    }
    settings.extend(discard.map(str::to_owned));
    let mut words = vec![format!("node-name={}-node", disk.name)];
    let aio = aio.word();
    let driver = match disk.medium.is_qcow2() {
        true => {
            words.append(&mut settings);
            words.push(format!("file.driver={driver}"));
            words.extend(cache.iter().map(|word| format!("file.{word}")));
            words.push(format!("file.aio={aio}"));
            // The file below releases clusters that qcow2 frees.
            words.push("file.discard=unmap".to_owned());
            words.push(format!("file.filename={path}"));
            "qcow2"
        }
        false => {
            words.extend(cache.iter().map(|word| (*word).to_owned()));
            words.push(format!("aio={aio}"));
            words.append(&mut settings);
            words.push(format!("filename={path}"));
            driver
        }
    };
    format!("{driver},{}", words.join(","))
}
