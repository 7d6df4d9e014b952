//! The host of a checkpoint: properties that its processes may have come to rely on.

use dormouse_kernel::clock::now_unix_ms;
use dormouse_kernel::{cpu, proc};
use dormouse_record::{About, Bytes, Error, Result, StatePart};

use super::subject::Subject;
use crate::clock::{self, Offsets};
use crate::vdso::Object;

/// Properties of a host that do not change: read while all processes still run.
#[derive(Debug, Default)]
pub(crate) struct Host(About);

impl Host {
    pub(crate) fn look() -> Result<Self> {
        let boot_id = proc::boot_id().map_err(|e| Error::Elsewhere(e.to_string()))?;
        let object = Object::here();
        let part = |it: &cpu::StateComponent| {
            let cpu::StateComponent { number, offset, bytes } = *it;
            StatePart { number, offset, bytes }
        };
        Ok(Self(About {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            boot_id: boot_id.to_owned(),
            vdso: object.as_ref().map(Object::hash).unwrap_or_default(),
            vdso_image: Bytes(object.map(|object| object.image).unwrap_or_default()),
            cpu: cpu::features().iter().map(|name| (*name).to_owned()).collect(),
            cpu_state: cpu::state_components().iter().map(part).collect(),
            ..About::default()
        }))
    }

    /// Returns the record about the container, with the present time of its clocks.
    pub(crate) fn about(self, subject: &Subject, offsets: Offsets) -> Result<About> {
        let now = clock::now(offsets)?;
        Ok(About {
            container: subject.id.clone(),
            name: subject.name.clone(),
            created_unix_ms: now_unix_ms(),
            monotonic_ns: now.monotonic_ns,
            boottime_ns: now.boottime_ns,
            monotonic_offset_ns: offsets.monotonic_ns,
            boottime_offset_ns: offsets.boottime_ns,
            ..self.0
        })
    }
}
