//! Code points of PDU headers: opcodes, functions, reasons, statuses.

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident: $int:ty { $($(#[$item_doc:meta])* $item:ident = $value:expr,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($int)]
        pub enum $name {
            $($(#[$item_doc])* $item = $value,)+
        }

        impl $name {
            /// Converts a wire value; returns `None` for an undefined one.
            pub const fn from_wire(value: $int) -> Option<Self> {
                match value {
                    $($value => Some($name::$item),)+
                    _ => None,
                }
            }

            /// Returns the wire value.
            pub const fn wire(self) -> $int {
                self as $int
            }
        }
    };
}

codes! {
    /// PDU opcodes (11.2.1.2).
    Opcode: u8 {
        /// NOP-Out
        NopOut = 0x00,
        /// SCSI Command
        ScsiCommand = 0x01,
        /// SCSI Task Management Function Request
        TaskManagementRequest = 0x02,
        /// Login Request
        LoginRequest = 0x03,
        /// Text Request
        TextRequest = 0x04,
        /// SCSI Data-Out
        DataOut = 0x05,
        /// Logout Request
        LogoutRequest = 0x06,
        /// SNACK Request
        SnackRequest = 0x10,
        /// NOP-In
        NopIn = 0x20,
        /// SCSI Response
        ScsiResponse = 0x21,
        /// SCSI Task Management Function Response
        TaskManagementResponse = 0x22,
        /// Login Response
        LoginResponse = 0x23,
        /// Text Response
        TextResponse = 0x24,
        /// SCSI Data-In
        DataIn = 0x25,
        /// Logout Response
        LogoutResponse = 0x26,
        /// Ready To Transfer
        ReadyToTransfer = 0x31,
        /// Asynchronous Message
        AsyncMessage = 0x32,
        /// Reject
        Reject = 0x3f,
    }
}

codes! {
    /// Reasons of a Reject PDU (11.17.1).
    RejectReason: u8 {
        /// Data (payload) digest error
        DataDigestError = 0x02,
        /// SNACK Reject
        SnackReject = 0x03,
        /// Protocol Error
        ProtocolError = 0x04,
        /// Command not supported
        CommandNotSupported = 0x05,
        /// Immediate command reject: too many immediate commands
        TooManyImmediateCommands = 0x06,
        /// Task in progress
        TaskInProgress = 0x07,
        /// Invalid data ack
        InvalidDataAck = 0x08,
        /// Invalid PDU field
        InvalidPduField = 0x09,
        /// Long op reject: out of resources
        LongOperation = 0x0a,
        /// Negotiation reset
        NegotiationReset = 0x0b,
        /// Waiting for logout
        WaitingForLogout = 0x0c,
    }
}

codes! {
    /// Task management functions (11.5.1; 9 to 12: RFC 7144).
    TaskFunction: u8 {
        /// ABORT TASK
        AbortTask = 1,
        /// ABORT TASK SET
        AbortTaskSet = 2,
        /// CLEAR ACA
        ClearAca = 3,
        /// CLEAR TASK SET
        ClearTaskSet = 4,
        /// LOGICAL UNIT RESET
        LogicalUnitReset = 5,
        /// TARGET WARM RESET
        TargetWarmReset = 6,
        /// TARGET COLD RESET
        TargetColdReset = 7,
        /// TASK REASSIGN
        TaskReassign = 8,
        /// QUERY TASK
        QueryTask = 9,
        /// QUERY TASK SET
        QueryTaskSet = 10,
        /// I_T NEXUS RESET
        ItNexusReset = 11,
        /// QUERY ASYNCHRONOUS EVENT
        QueryAsynchronousEvent = 12,
    }
}

codes! {
    /// Responses to a task management function (11.6.1; 7: RFC 7144).
    TaskFunctionResponse: u8 {
        /// Function complete
        Complete = 0,
        /// Task does not exist
        TaskDoesNotExist = 1,
        /// LUN does not exist
        LunDoesNotExist = 2,
        /// Task still allegiant
        TaskStillAllegiant = 3,
        /// Task allegiance reassignment not supported
        ReassignmentNotSupported = 4,
        /// Task management function not supported
        NotSupported = 5,
        /// Function authorization failed
        AuthorizationFailed = 6,
        /// Function succeeded
        Succeeded = 7,
        /// Function rejected
        Rejected = 255,
    }
}

codes! {
    /// Task attributes of a SCSI Command (11.3.1).
    TaskAttribute: u8 {
        /// Untagged
        Untagged = 0,
        /// Simple
        Simple = 1,
        /// Ordered
        Ordered = 2,
        /// Head of queue
        HeadOfQueue = 3,
        /// ACA
        Aca = 4,
    }
}

codes! {
    /// Reasons of a Logout Request (11.14.1).
    LogoutReason: u8 {
        /// Close the session
        CloseSession = 0,
        /// Close the connection named by its CID
        CloseConnection = 1,
        /// Remove the connection for recovery
        RemoveForRecovery = 2,
    }
}

codes! {
    /// Responses to a Logout Request (11.15.1).
    LogoutResponseCode: u8 {
        /// Connection or session closed successfully
        Success = 0,
        /// CID not found
        CidNotFound = 1,
        /// Connection recovery is not supported
        RecoveryNotSupported = 2,
        /// Cleanup failed for various reasons
        CleanupFailed = 3,
    }
}

codes! {
    /// Events of an Asynchronous Message (11.9.1).
    AsyncEvent: u8 {
        /// A SCSI asynchronous event; sense data in the data segment
        ScsiEvent = 0,
        /// The target requests Logout
        RequestLogout = 1,
        /// The target will drop the connection
        DropConnection = 2,
        /// The target will drop all connections of the session
        DropSession = 3,
        /// The target requests parameter negotiation
        RequestNegotiation = 4,
        /// All active tasks of the LU are being terminated
        TasksTerminated = 5,
        /// Vendor specific
        Vendor = 255,
    }
}

codes! {
    /// Stages of the login phase, the CSG and NSG fields (11.12.3).
    Stage: u8 {
        /// SecurityNegotiation
        Security = 0,
        /// LoginOperationalNegotiation
        Operational = 1,
        /// FullFeaturePhase
        FullFeature = 3,
    }
}

codes! {
    /// Status-Class and Status-Detail of a Login Response as one number (11.13.5).
    LoginStatus: u16 {
        /// Login proceeds
        Success = 0x0000,
        /// Target moved temporarily
        MovedTemporarily = 0x0101,
        /// Target moved permanently
        MovedPermanently = 0x0102,
        /// Initiator error: miscellaneous
        InitiatorError = 0x0200,
        /// Authentication failure
        AuthenticationFailure = 0x0201,
        /// Authorization failure
        AuthorizationFailure = 0x0202,
        /// Not found
        NotFound = 0x0203,
        /// Target removed
        TargetRemoved = 0x0204,
        /// Unsupported version
        UnsupportedVersion = 0x0205,
        /// Too many connections
        TooManyConnections = 0x0206,
        /// Missing parameter
        MissingParameter = 0x0207,
        /// Cannot include in session
        CannotIncludeInSession = 0x0208,
        /// Session type not supported
        SessionTypeNotSupported = 0x0209,
        /// Session does not exist
        SessionDoesNotExist = 0x020a,
        /// Invalid request during login
        InvalidDuringLogin = 0x020b,
        /// Target error
        TargetError = 0x0300,
        /// Service unavailable
        ServiceUnavailable = 0x0301,
        /// Out of resources
        OutOfResources = 0x0302,
    }
}

impl std::fmt::Display for LoginStatus {
    /// Formats the meaning and the number.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = match self {
            LoginStatus::Success => "login proceeds",
            LoginStatus::MovedTemporarily => "the target has moved temporarily",
            LoginStatus::MovedPermanently => "the target has moved permanently",
            LoginStatus::InitiatorError => "initiator error",
            LoginStatus::AuthenticationFailure => "authentication failed",
            LoginStatus::AuthorizationFailure => {
                "authorization failure: the target does not admit this initiator"
            }
            LoginStatus::NotFound => "target not found",
            LoginStatus::TargetRemoved => "the target was removed",
            LoginStatus::UnsupportedVersion => "the version is not supported",
            LoginStatus::TooManyConnections => "the session has too many connections",
            LoginStatus::MissingParameter => "a parameter is missing",
            LoginStatus::CannotIncludeInSession => "the connection cannot join the session",
            LoginStatus::SessionTypeNotSupported => "the session type is not supported",
            LoginStatus::SessionDoesNotExist => "the session does not exist",
            LoginStatus::InvalidDuringLogin => "invalid request during login",
            LoginStatus::TargetError => "the target has an error",
            LoginStatus::ServiceUnavailable => "the target service is unavailable",
            LoginStatus::OutOfResources => "the target is out of resources",
        };
        write!(f, "{words} (status {:#06x})", self.wire())
    }
}

codes! {
    /// Types of a SNACK Request (11.16.1).
    SnackType: u8 {
        /// Data or R2T
        Data = 0,
        /// Status
        Status = 1,
        /// DataACK
        DataAck = 2,
        /// R-Data: after MaxRecvDataSegmentLength has changed
        ResegmentedData = 3,
    }
}
