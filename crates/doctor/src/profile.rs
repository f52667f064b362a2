//! Sets of kernel parameters for a purpose, compared with a host's.

use crate::Host;

/// A kernel parameter with the value of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Name as in sysctl(8).
    pub name: &'static str,
    /// Recommended value.
    pub value: &'static str,
    /// Purpose.
    pub why: &'static str,
}

/// Parameters for one purpose.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Name on the command line.
    pub name: &'static str,
    /// Purpose.
    pub about: &'static str,
    /// Parameters.
    pub parameters: &'static [Parameter],
}

/// All profiles.
pub const PROFILES: [Profile; 1] = [Profile {
    name: "iscsi-10g",
    about: "iSCSI over links of 10 Gbit/s and more. Time stamps and selective acknowledgements stay on, although old guides turn them off: without them a lossy link is far slower.",
    parameters: &[
        Parameter {
            name: "net.core.rmem_max",
            value: "16777216",
            why: "maximum receive buffer",
        },
        Parameter {
            name: "net.core.wmem_max",
            value: "16777216",
            why: "maximum send buffer",
        },
        Parameter {
            name: "net.ipv4.tcp_rmem",
            value: "4096 131072 16777216",
            why: "limits of automatic receive buffer tuning",
        },
        Parameter {
            name: "net.ipv4.tcp_wmem",
            value: "4096 65536 16777216",
            why: "limits of automatic send buffer tuning",
        },
        Parameter {
            name: "net.core.netdev_max_backlog",
            value: "30000",
            why: "maximum backlog of received packets per CPU",
        },
        Parameter {
            name: "net.ipv4.tcp_no_metrics_save",
            value: "1",
            why: "new connections do not inherit the metrics of earlier ones",
        },
    ],
}];

/// One parameter with the host's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Name on the command line.
    pub name: &'static str,
    /// Value of the host; `None` if it does not have the parameter.
    pub is: Option<String>,
    /// Value of the profile.
    pub wanted: &'static str,
    /// Purpose.
    pub why: &'static str,
}

impl Row {
    /// Returns true if the value should change. Larger values than the profile's are accepted.
    pub fn differs(&self) -> bool {
        let Some(is) = &self.is else {
            return false;
        };
        let numbers = |text: &str| {
            text.split_whitespace()
                .map(str::parse::<u64>)
                .collect::<Result<Vec<_>, _>>()
        };
        match (numbers(is), numbers(self.wanted)) {
            (Ok(is), Ok(wanted)) => is.last() < wanted.last(),
            _ => is != self.wanted,
        }
    }

    /// Returns the path of the parameter's file.
    pub fn file(&self) -> String {
        file_of(self.name)
    }
}

fn file_of(name: &str) -> String {
    format!("/proc/sys/{}", name.replace('.', "/"))
}

impl Profile {
    /// Finds a profile by name.
    pub fn named(name: &str) -> Option<&'static Profile> {
        PROFILES.iter().find(|profile| profile.name == name)
    }

    /// Compares the parameters with a host's.
    pub fn rows(&self, host: &Host) -> Vec<Row> {
        let rows = self.parameters.iter().map(|parameter| Row {
            name: parameter.name,
            is: host.text(&file_of(parameter.name)),
            wanted: parameter.value,
            why: parameter.why,
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_values_than_the_profile_are_accepted() {
        let record = "--- /proc/sys/net/core/rmem_max\n212992\n--- /proc/sys/net/core/wmem_max\n33554432\n\
                      --- /proc/sys/net/ipv4/tcp_rmem\n4096\t131072\t6291456\n";
        let host = Host::recorded(record).unwrap();
        let rows = Profile::named("iscsi-10g").unwrap().rows(&host);
        let differs: Vec<&str> = rows
            .iter()
            .filter(|row| row.differs())
            .map(|row| row.name)
            .collect();
        assert_eq!(differs, ["net.core.rmem_max", "net.ipv4.tcp_rmem"]);
        assert_eq!(rows[0].file(), "/proc/sys/net/core/rmem_max");
    }
}
