//! SCSI target core: CDB in, plan out.
