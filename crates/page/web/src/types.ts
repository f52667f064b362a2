// Answers of the daemon's API, as far as the page reads them.

export interface Disk {
  name: string;
  backend: string;
  path?: string;
  size: number;
  /** Bytes that its files occupy, and free bytes of their file system. */
  allocated?: number;
  free?: number;
  block_size: number;
  serial: string;
  state: string;
  reason?: string;
  waiting?: number;
  waiting_reason?: string;
  next_try_seconds?: number;
  reservations_unknown?: string;
  warning?: string;
  /** Time that 1 % of the requests of a slow disk exceed, in nanoseconds. */
  slow_ns?: number;
  damage?: string;
  /** I/Os that the storage failed within the last hour. */
  failures?: DiskFailures[];
  read_only?: boolean;
}

export interface DiskFailures {
  class: string;
  count: number;
}

export interface Export {
  name: string;
  kind: string;
  connected: boolean;
  luns: { disk: string }[];
  socket?: string;
  addresses?: string[];
  warning?: string;
}

/** A listener that accepts clients. */
export interface OpenListener {
  kind: string;
  export?: string;
  address: string;
}

/** A listener that cannot be opened yet. */
export interface WaitingListener {
  kind: string;
  export?: string;
  address: string;
  reason: string;
}

/** A condition that needs attention. */
export interface Problem {
  severity: "error" | "warning";
  object: string;
  name: string;
  problem: string;
  next_try_seconds?: number;
  hint?: string;
}

export interface Status {
  version: string;
  host?: string;
  pid: number;
  uptime_seconds: number;
  workers: number;
  may_change: boolean;
  /** Absent if the daemon is older or has no control socket. */
  upgrade_command?: string;
  disks: Disk[];
  exports: Export[];
  open_listeners?: OpenListener[];
  waiting_listeners?: WaitingListener[];
  problems?: Problem[];
}

export interface Histogram {
  count: number;
  sum_ns: number;
  /** Upper bounds in nanoseconds, and how many requests were below. */
  buckets: [number, number][];
}

export interface Latencies {
  operations: Record<string, Record<string, Histogram> | { spans: Record<string, Histogram> }>;
}

export interface SlowRequest {
  operation: string;
  total_ns: number;
  /** In milliseconds since 1970. */
  ended_ms?: number;
  stages_ns: number[];
}

export interface Queue {
  labels: { export: string; queue: number; disk?: string };
  latencies?: Latencies;
  /** Of a queue that serves several disks. */
  disks?: Record<string, Latencies>;
  slow?: SlowRequest[];
}

export interface DiskCounters {
  name: string;
  operations: Record<string, { requests: number; bytes: number }>;
  errors: Record<string, number>;
  waiting: number;
  in_flight: number;
}

export interface Worker {
  worker: number;
  sleeps: number;
  work_ns?: number;
  poll_found_ns?: number;
  poll_empty_ns?: number;
  sleep_ns?: number;
}

export interface Job {
  disk: string;
  kind: string;
  state: string;
  reason?: string;
  done: number;
  total: number;
  target?: string;
  /** Backup of one or more disks that the job belongs to. */
  backup?: string;
  speed?: number;
}

/** A backup of one or more disks. */
export interface Backup {
  name: string;
  /** Address at which the disks are served. */
  pull?: string;
  checkpoint?: string;
  since?: string;
  jobs: Job[];
}

export interface Statistics {
  /** Nanoseconds since the daemon started. */
  at_ns: number;
  disks: DiskCounters[];
  queues?: Queue[];
  workers: Worker[];
  jobs?: Job[];
}

export interface Moment {
  status: Status;
  statistics: Statistics;
}

export interface Session {
  export: string;
  kind: string;
  initiator?: string;
  client?: string;
  front_end?: { pid?: number; user: string; guest?: string };
  each_connection?: { client: string }[];
  connections: number;
  requests?: number;
  errors?: number;
}

export interface Bitmap {
  disk: string;
  name: string;
  dirty: number;
  at: number;
  target: string;
  reason?: string;
}

export interface Happened {
  id: number;
  event: string;
  name: string;
  disk?: string;
  size?: number;
}

/** What `lunette report` puts into the page instead of a daemon. */
export interface Report {
  seconds: number;
  samples: Moment[];
  answers: Record<string, unknown>;
}
