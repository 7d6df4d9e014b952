//! Order: the room that orders the pending connections of shared services by account.
//!
//! The room finds the shared services and the accounts of their clients. A thread ([`crate::admit`]) holds and admits
//! connections, because a turn of another room would delay each of them. The thread begins with the first service, and
//! it ends no connection: whenever the daemon ends or is killed, the kernel admits all that come.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{Debtor, Engine};
use dormouse_kernel::cgroup::Hierarchy;
use dormouse_model::ContainerId;

use crate::admit::{Admitter, Plan, Service};
use crate::error::{Result, step};
use crate::room::{Notice, Room};

/// Events of so long are taken together.
const TICK: Duration = Duration::from_millis(50);
/// Interval of rounds, which make up for missed events and begin a thread again that has ended.
const ROUND_EVERY: Duration = Duration::from_secs(600);
/// At least so many times the duration of a round passes before the next one.
const SPARING: u32 = 20;
/// LIMIT: the time for which the end of the daemon waits for the thread.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// The room.
#[derive(Debug)]
pub(crate) struct Order {
    engine: Rc<Engine>,
    debtors: BTreeMap<ContainerId, Debtor>,
    plan: Plan,
    thread: Option<Admitter>,
    is_outdated: bool,
    round: Instant,
    round_took: Duration,
}

impl Order {
    pub(crate) fn begin(engine: Rc<Engine>) -> Self {
        Self {
            engine,
            debtors: BTreeMap::new(),
            plan: Plan::default(),
            thread: None,
            is_outdated: true,
            round: Instant::now(),
            round_took: Duration::ZERO,
        }
    }

    /// Finds services and clients, and gives them to the thread if they have changed.
    fn find(&mut self) -> Result<()> {
        let plan = self.look()?;
        self.thread.take_if(|thread| thread.has_ended());
        match &self.thread {
            Some(_) if plan == self.plan => {}
            None if plan.stacks.is_empty() => {}
            Some(thread) => thread.follow(plan.clone()),
            None => {
                let begun = Admitter::begin(self.engine.places());
                let thread = begun.map_err(step("begin the thread that admits connections"))?;
                thread.follow(plan.clone());
                self.thread = Some(thread);
            }
        }
        self.plan = plan;
        Ok(())
    }

    fn look(&mut self) -> Result<Plan> {
        if !self.engine.orders_services()? || self.engine.started()?.is_empty() {
            self.debtors.clear();
            return Ok(Plan::default());
        }
        let cgroups = Hierarchy::open(&self.engine.places().cgroup)?;
        // On an error, the known ones stay.
        self.debtors = self.engine.debtors(&cgroups, self.debtors.clone())?;
        let mut plan = plan(&self.debtors);
        if !plan.stacks.is_empty() {
            plan.limits = self.engine.connection_limits()?;
            // With a damaged list, which the verbs report, nothing is believed.
            plan.agreement = self.engine.agreement().unwrap_or_default();
        }
        Ok(plan)
    }
}

/// Makes the plan for these running containers.
fn plan(debtors: &BTreeMap<ContainerId, Debtor>) -> Plan {
    let mut plan = Plan::default();
    for (id, one) in debtors.iter().filter(|(_, one)| one.is_shared) {
        let (Some(domain), Some(IpAddr::V4(first))) = (&one.domain, one.addresses.first()) else {
            continue;
        };
        let stack = plan.stacks.entry(domain.clone()).or_default();
        let service = Service { cgroup_v2_id: one.cgroup_v2_id, first: *first };
        stack.services.extend(one.addresses.iter().map(|ip| (*ip, service)));
        plan.containers.insert(one.cgroup_v2_id, id.clone());
    }
    if plan.stacks.is_empty() {
        return plan;
    }
    for one in debtors.values() {
        let Some(account) = one.payer else { continue };
        // Containers of one account have their weights together.
        *plan.weights.entry(account).or_default() += one.cpu.weight;
        if let Some(stack) = one.domain.as_ref().and_then(|name| plan.stacks.get_mut(name)) {
            stack.clients.extend(one.addresses.iter().map(|ip| (*ip, account)));
        }
    }
    plan
}

impl Room for Order {
    fn name(&self) -> &'static str {
        "order"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        let after = match self.is_outdated {
            true => TICK.max(self.round_took * SPARING),
            false => ROUND_EVERY,
        };
        Some(self.round + after)
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        (self.round, self.is_outdated) = (now, false);
        let found = self.find();
        self.round_took = now.elapsed();
        found.inspect_err(|_| self.is_outdated = true).map(|()| Vec::new())
    }

    fn notice(&mut self, _now: Instant, notice: &Notice) {
        if matches!(notice, Notice::Events | Notice::Ended(_)) {
            self.is_outdated = true;
        }
    }

    fn end(mut self: Box<Self>) {
        if let Some(thread) = self.thread.take() {
            thread.stop(ENDS_WITHIN);
        }
    }
}
