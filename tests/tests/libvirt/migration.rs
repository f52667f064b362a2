//! `virsh migrate` between two libvirt daemons on this machine. Each has a host name, an identity and folders of its own, so that each
//! is another host to the other.

use end_to_end::rig::free_portal;
use end_to_end::{Context, GuestBuilder, Result, Rig, Scratch, bail, ensure};
use std::fmt::Write as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use vm::{Agent, Output, tool, wait_until};

use super::{BOOT_LIMIT, is_root, printed};

/// Time limit for a libvirt daemon to answer.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the last verification of a load.
const LOAD_LIMIT: Duration = Duration::from_secs(120);
/// Memory of the guest in KiB; see `GuestBuilder::migrates`. libvirt rounds sizes to MiB, so QEMU gets this one by arguments of its own.
const MEMORY_KIB: u32 = 192 * 1024 + 64;

/// Settings of libvirt's QEMU driver: it starts QEMU as its own user, without cgroups, namespaces and a log daemon.
const SETTINGS: &str = r#"user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
stdio_handler = "file"
namespaces = []
cgroup_controllers = []
"#;

/// Starts libvirtd with mounts over the folders of the system's libvirt. A folder that the system does not have exists in this namespace only.
/// libvirtd needs a user that only a package of Debian creates.
const SCRIPT: &str = r#"hostname "$NAME"
mkdir -p "$FOLDER/upper" && mount -t tmpfs tmpfs "$FOLDER/upper" || exit 1
for folder in run lib cache log etc; do
    case $folder in run|etc) parent=/$folder ;; *) parent=/var/$folder ;; esac
    mkdir -p "$FOLDER/$folder"
    if [ ! -d "$parent/libvirt" ]; then
        upper="$FOLDER/upper/$folder" work="$FOLDER/upper/work-$folder"
        mkdir -p "$upper/libvirt" "$work"
        mount -t overlay -o "userxattr,lowerdir=$parent,upperdir=$upper,workdir=$work" overlay "$parent" || exit 1
    fi
    mount --bind "$FOLDER/$folder" "$parent/libvirt" || exit 1
done
for file in passwd group; do
    cp "/etc/$file" "$FOLDER/$file"
    grep -q ^libvirt-qemu: "/etc/$file" || case $file in
        passwd) echo libvirt-qemu:x:64055:64055::/:/bin/false ;;
        group) echo libvirt-qemu:x:64055: ;;
    esac >> "$FOLDER/$file"
    mount --bind "$FOLDER/$file" "/etc/$file" || exit 1
done
mkdir -p /etc/libvirt/qemu && cp "$FOLDER"/*.conf /etc/libvirt/
# A shell is the first process of the namespace: it waits for the ended processes of libvirtd.
libvirtd --pid-file "$FOLDER/pid" --config "$FOLDER/libvirtd.conf"
"#;

/// A pretended host: a libvirt daemon with its guests, in namespaces that end with it.
struct Host {
    folder: PathBuf,
    process: Child,
    /// Listens for the guest's second serial port.
    agent: UnixListener,
}

impl Host {
    fn start(scratch: &Scratch, name: &str, identity: &str) -> Result<Host> {
        let folder = scratch.socket(name);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("qemu.conf"), SETTINGS)?;
        let daemon = format!(
            "unix_sock_dir = \"{}\"\nhost_uuid = \"{identity}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n",
            folder.display()
        );
        std::fs::write(folder.join("libvirtd.conf"), daemon)?;
        tool("libvirtd")?;
        let log = std::fs::File::create(folder.join("libvirtd.log"))?;
        let mut command = Command::new(tool("unshare")?);
        command
            .args(["--mount", "--uts", "--pid", "--fork", "--kill-child"])
            .arg("--mount-proc");
        if !is_root() {
            command.arg("--map-root-user");
        }
        let process = command
            .args(["sh", "-c", SCRIPT])
            .env("NAME", name)
            .env("FOLDER", &folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let agent = UnixListener::bind(folder.join("agent"))?;
        let host = Host {
            folder,
            process,
            agent,
        };
        let answers = wait_until(START_LIMIT, || host.virsh(&["list"]).ok());
        answers.with_context(|| format!("{name} does not answer\n{}", host.log()))?;
        Ok(host)
    }

    fn uri(&self) -> String {
        let socket = self.folder.join("libvirt-sock");
        format!("qemu+unix:///system?socket={}", socket.display())
    }

    fn virsh(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(tool("virsh")?);
        let output = command.args(["-c", &self.uri()]).args(words).output()?;
        printed(output).with_context(|| format!("virsh {words:?}\n{}", self.log()))
    }

    fn log(&self) -> String {
        let log = std::fs::read(self.folder.join("libvirtd.log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Accepts QEMU's connection for the agent, which precedes the start of the machine.
    fn agent(&self) -> Result<Agent> {
        Agent::new(self.agent.accept()?.0)
    }

    /// Writes the domain of the guest with the disks at these sockets.
    fn domain(&self, blk: &Path, scsi: &Path) -> Result<PathBuf> {
        let (kernel, initramfs, words) = GuestBuilder::boot_files()?;
        let qemu = tool("qemu-system-x86_64")?;
        let mut more = String::new();
        for word in [
            "-m",
            &format!("{MEMORY_KIB}K"),
            "-object",
            &format!("memory-backend-memfd,id=all,size={MEMORY_KIB}K,share=on"),
            "-machine",
            "memory-backend=all",
            "-chardev",
            &format!("socket,id=c,path={}", scsi.display()),
            "-device",
            "vhost-user-scsi-pci,chardev=c,bus=pcie.0,addr=0x1d",
        ] {
            writeln!(more, "<qemu:arg value='{word}'/>")?;
        }
        let text = format!(
            r"<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>g</name>
<uuid>33333333-3333-4333-8333-333333333333</uuid>
<memory unit='MiB'>193</memory>
<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
<os>
  <type arch='x86_64' machine='q35'>hvm</type>
  <kernel>{kernel}</kernel><initrd>{initramfs}</initrd><cmdline>{words}</cmdline>
</os>
<features><acpi/></features>
<devices>
  <emulator>{qemu}</emulator>
  <disk type='vhostuser' device='disk'>
    <driver name='qemu' type='raw'/>
    <source type='unix' path='{blk}'><reconnect enabled='yes' timeout='1'/></source>
    <target dev='vda' bus='virtio'/>
  </disk>
  <serial type='file'><source path='{folder}/console.log'/></serial>
  <serial type='unix'><source mode='connect' path='{folder}/agent'/></serial>
  <memballoon model='none'/>
</devices>
<qemu:commandline>
{more}</qemu:commandline>
</domain>
",
            kernel = kernel.display(),
            initramfs = initramfs.display(),
            qemu = qemu.display(),
            blk = blk.display(),
            folder = self.folder.display(),
        );
        let file = self.folder.join("domain.xml");
        std::fs::write(&file, text)?;
        Ok(file)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The namespace ends with its first process, and with it libvirtd and QEMU.
        self.process.kill().unwrap_or(());
        self.process.wait().map(drop).unwrap_or(());
    }
}

/// Moves the guest and returns the connection to its agent.
fn migrate(from: &Host, to: &Host, domain: &Path, how: &[&str], agent: &Agent) -> Result<Agent> {
    let domain = domain.display().to_string();
    let (uri, port) = (to.uri(), format!("tcp://{}", free_portal()?));
    let timeout = ["--timeout", "60", "--timeout-suspend"];
    let words = [&["migrate", "--live"][..], &timeout, &["--xml", &domain]].concat();
    let place = ["g", &uri, "--migrateuri", &port];
    from.virsh(&[&words[..], how, &place].concat())?;
    let mut moved = to.agent()?;
    moved.continue_from(agent);
    let guests = (
        from.virsh(&["list", "--name"])?,
        to.virsh(&["list", "--name"])?,
    );
    ensure!(
        guests.0.trim().is_empty() && guests.1.trim() == "g",
        "{guests:?}"
    );
    Ok(moved)
}

fn run(agent: &mut Agent, script: &str) -> Result<Output> {
    let running = agent.start(script)?;
    agent.wait(running, LOAD_LIMIT)
}

#[test]
fn virsh_moves_a_guest_to_another_host_and_back() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        let mut daemon = daemon.disk("d0=ram:64M").disk("d1=ram:32M");
        for side in ["a", "b"] {
            let socket = scratch.socket(&format!("{side}.sock"));
            let (blk, scsi) = (
                format!("d0:{},name={side}", socket.display()),
                format!("s{side}"),
            );
            daemon = daemon
                .arguments(["--vhost-blk", &blk])
                .vhost_scsi(&scsi)
                .lun(&format!("{scsi}/0:0=d1"));
        }
        Ok(daemon)
    })?;
    let alpha = Host::start(
        &rig.scratch,
        "alpha",
        "11111111-1111-4111-8111-111111111112",
    )?;
    let beta = Host::start(&rig.scratch, "beta", "22222222-2222-4222-8222-222222222223")?;
    let first = alpha.domain(&rig.socket("a"), &rig.socket("sa"))?;
    let second = beta.domain(&rig.socket("b"), &rig.socket("sb"))?;
    alpha.virsh(&["create", &first.display().to_string()])?;
    let mut agent = alpha.agent()?;
    if let Err(error) = agent.wait_for_boot(1, BOOT_LIMIT) {
        let console = std::fs::read(alpha.folder.join("console.log"))?;
        bail!("{error:#}\n{}", String::from_utf8_lossy(&console));
    }
    let mut loads = Vec::new();
    for disk in ["vda", "sda"] {
        let load =
            format!("guest-agent soak --while /tmp/{disk} --file /dev/{disk} --seed 1 --depth 4");
        loads.push(agent.start(&load)?);
        let begins = format!("until [ -e /tmp/{disk} ]; do sleep 0.1; done");
        ensure!(run(&mut agent, &begins)?.code == 0);
    }
    let agent = migrate(&alpha, &beta, &second, &[], &agent)?;
    let mut agent = migrate(&beta, &alpha, &first, &["--p2p"], &agent)?;
    ensure!(run(&mut agent, "rm /tmp/vda /tmp/sda")?.code == 0);
    for load in loads {
        let ended = agent.wait(load, LOAD_LIMIT)?;
        let is_right = ended.code == 0 && ended.stdout.contains("\"mismatches\":0");
        ensure!(is_right, "{ended:?}");
    }
    Ok(())
}
