//! Reasons for which a change is refused. All reasons are reported at once, each with its field.

use std::fmt;

use config::{Diagnostics, Mistake};

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// JSON pointer (RFC 6901) to the field in the request; empty for the whole request.
    pub pointer: String,
    /// Description of the error.
    pub detail: String,
    /// Allowed values.
    pub allowed: Option<String>,
    /// Hint for the user.
    pub help: Option<String>,
}

impl Fault {
    /// Creates a reason without a field.
    pub fn new(detail: impl Into<String>) -> Fault {
        Fault::at("", detail)
    }

    /// Creates a reason about a field.
    pub fn at(pointer: impl Into<String>, detail: impl Into<String>) -> Fault {
        Fault {
            pointer: pointer.into(),
            detail: detail.into(),
            allowed: None,
            help: None,
        }
    }

    /// Adds a hint.
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

impl From<&Mistake> for Fault {
    fn from(mistake: &Mistake) -> Fault {
        Fault {
            pointer: mistake.location.source.label.clone(),
            detail: mistake.message.clone(),
            allowed: mistake.allowed.clone(),
            help: mistake.help.clone(),
        }
    }
}

/// Refusal of a change. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The object does not exist.
    NotFound(Fault),
    /// The request is invalid.
    Invalid(Vec<Fault>),
    /// The client lacks the right for this operation or for these files.
    Forbidden(Vec<Fault>),
    /// The object is in use, or a name or resource is taken.
    Conflict(Vec<Fault>),
    /// A system call or device failed.
    Failed(Vec<Fault>),
    /// The change could not be persisted and was rolled back.
    NotPersisted(String),
    /// The daemon is ending.
    Ending,
}

impl Refusal {
    /// Creates a conflict with one reason and a hint.
    pub(crate) fn conflict(detail: String, help: &str) -> Refusal {
        Refusal::Conflict(vec![Fault::new(detail).help(help)])
    }

    /// Adds the pointer of the object that the fields are in.
    #[must_use]
    pub(crate) fn within(mut self, pointer: &str) -> Refusal {
        if let Refusal::Invalid(faults) = &mut self {
            for fault in faults {
                fault.pointer.insert_str(0, pointer);
            }
        }
        self
    }

    /// Returns all reasons.
    pub fn faults(&self) -> Vec<Fault> {
        match self {
            Refusal::NotFound(fault) => vec![fault.clone()],
            Refusal::Invalid(faults)
            | Refusal::Forbidden(faults)
            | Refusal::Conflict(faults)
            | Refusal::Failed(faults) => faults.clone(),
            Refusal::NotPersisted(reason) => vec![Fault::new(reason.clone())],
            Refusal::Ending => vec![Fault::new("the daemon is shutting down")],
        }
    }
}

impl From<Diagnostics> for Refusal {
    fn from(mistakes: Diagnostics) -> Refusal {
        Refusal::Invalid(mistakes.iter().map(Fault::from).collect())
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
