//! Client requests: selects blocks and content and records them in the model.

use super::{INITIATORS, Pending, SimClient, World};
use crate::clients::{Kind, Request};
use crate::life::{BLK_QUEUES, WORKERS};
use crate::model::{BLOCK, Value, fill};
use crate::random::Random;

/// Maximum number of blocks of a request.
const BLOCKS_MAX: u64 = 9;

impl World {
    fn value(&mut self) -> Value {
        self.next_value += 1;
        self.next_value
    }

    pub(super) fn submit(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        // Half of the requests use virtio-blk, which has the most queues.
        let blk = self.plans.len() * usize::from(BLK_QUEUES);
        let index = match random.below(4) {
            0 | 1 => random.below(blk as u64) as usize,
            2 => blk + random.below(WORKERS as u64) as usize,
            _ => blk + WORKERS + random.below(INITIATORS) as usize,
        };
        for _ in 0..1 + random.below(4) {
            self.submit_one(index, &mut random);
        }
    }

    fn request(&mut self, disk: usize, kind: Kind, random: &mut Random) -> (Request, Value, Value) {
        let model = &self.models[disk];
        let blocks = match kind {
            Kind::Flush => 0,
            Kind::CompareAndWrite => 1,
            _ => 1 + random.below(BLOCKS_MAX),
        };
        // Most requests go to the same few blocks.
        let span = match random.below(3) {
            0 => model.len(),
            _ => model.len().min(40),
        };
        let lba = random.below(span - blocks.min(span - 1));
        let (value, mut expected) = match kind {
            Kind::Write { .. } | Kind::CompareAndWrite => (self.value(), 0),
            _ => (0, 0),
        };
        let mut data = Vec::new();
        if kind == Kind::CompareAndWrite {
            expected = self.models[disk].any_value(lba, random);
            data.resize(BLOCK, 0);
            fill(&mut data, expected, lba);
        }
        if value > 0 {
            for at in 0..blocks {
                let mut block = [0; BLOCK];
                fill(&mut block, value, lba + at);
                data.extend(block);
            }
        }
        let request = Request {
            token: self.tick(),
            disk,
            kind,
            lba,
            blocks,
            data,
        };
        (request, value, expected)
    }

    fn submit_one(&mut self, index: usize, random: &mut Random) {
        let kind = match random.below(20) {
            0..=7 => Kind::Write {
                durable: random.one_in(4),
            },
            8..=12 => Kind::Read,
            13..=14 => Kind::Flush,
            15..=16 => Kind::Zero {
                unmap: random.one_in(2),
            },
            17 => Kind::Discard,
            _ => Kind::CompareAndWrite,
        };
        let any = random.below(self.plans.len() as u64) as usize;
        let disk = match &self.clients[index] {
            SimClient::Blk(one) => one.disk(),
            _ => any,
        };
        if !self.clients[index].client().can(kind) {
            return;
        }
        let (request, value, expected) = self.request(disk, kind, random);
        if self.clients[index].client().submit(&request) {
            self.submitted(index, request, value, expected);
        }
    }

    pub(super) fn submitted(
        &mut self,
        index: usize,
        request: Request,
        value: Value,
        expected: Value,
    ) {
        let begin = request.token;
        let name = self.clients[index].client().name();
        let Request {
            token,
            disk,
            kind,
            lba,
            blocks,
            ..
        } = request;
        log_step!(
            self,
            "{name}: request {token}: {kind:?} of d{disk}, {blocks} blocks at {lba}, value {value}"
        );
        if !matches!(kind, Kind::Read | Kind::Flush | Kind::Reserve(_)) {
            let model = &mut self.models[disk];
            match kind {
                Kind::CompareAndWrite => model.begin_compare(lba, expected, value, begin),
                _ => (lba..lba + blocks).for_each(|lba| model.begin(lba, value, begin)),
            }
        }
        let pending = Pending {
            client: index,
            request,
            begin,
            expected,
            survived: false,
            reservations: self.changes_of_reservations(disk),
        };
        self.pending.insert(token, pending);
    }
}
