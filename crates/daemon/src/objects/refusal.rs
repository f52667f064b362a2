//! Why a change is not made: all reasons at once, each with the field that it is about.

use std::fmt;

use config::Diagnostics;

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// JSON pointer (RFC 6901) of the field in what was asked for; empty: all of it.
    pub pointer: String,
    /// What is wrong.
    pub detail: String,
    /// What is allowed there.
    pub allowed: Option<String>,
    /// What to do.
    pub help: Option<String>,
}

impl Fault {
    /// A reason that is about no field in particular.
    pub fn new(detail: impl Into<String>) -> Fault {
        Fault::at("", detail)
    }

    /// A reason about a field.
    pub fn at(pointer: impl Into<String>, detail: impl Into<String>) -> Fault {
        Fault {
            pointer: pointer.into(),
            detail: detail.into(),
            allowed: None,
            help: None,
        }
    }

    /// Adds what to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Fault {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)?;
        if let Some(allowed) = &self.allowed {
            write!(f, "; allowed: {allowed}")?;
        }
        if let Some(help) = &self.help {
            write!(f, "; {help}")?;
        }
        Ok(())
    }
}

/// Why a change is not made. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// What it is about is not there.
    NotFound(Fault),
    /// What was asked for makes no sense.
    Invalid(Vec<Fault>),
    /// The client may not do this, or not with these files.
    Forbidden(Vec<Fault>),
    /// Something is in the way: it is in use, or taken.
    Conflict(Vec<Fault>),
    /// The system does not give what it takes.
    Failed(Vec<Fault>),
    /// It could not be written down, so it was taken back.
    NotKept(String),
    /// The daemon ends.
    Ending,
}

impl Refusal {
    /// One thing is in the way, and this is what to do about it.
    pub(crate) fn conflict(detail: String, help: &str) -> Refusal {
        Refusal::Conflict(vec![Fault::new(detail).help(help)])
    }

    /// All reasons.
    pub fn faults(&self) -> Vec<Fault> {
        match self {
            Refusal::NotFound(fault) => vec![fault.clone()],
            Refusal::Invalid(faults)
            | Refusal::Forbidden(faults)
            | Refusal::Conflict(faults)
            | Refusal::Failed(faults) => faults.clone(),
            Refusal::NotKept(reason) => vec![Fault::new(reason.clone())],
            Refusal::Ending => vec![Fault::new("the daemon is shutting down")],
        }
    }
}

impl From<Diagnostics> for Refusal {
    fn from(mistakes: Diagnostics) -> Refusal {
        let fault = |mistake: &config::Mistake| Fault {
            pointer: mistake.place.source.label.clone(),
            detail: mistake.message.clone(),
            allowed: mistake.allowed.clone(),
            help: mistake.help.clone(),
        };
        Refusal::Invalid(mistakes.iter().map(fault).collect())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults().iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusal {}
