//! The first byte of a client, for containers that are not woken by a connection alone.
//!
//! With `--wake-on data-first` a connection to a listening TCP socket wakes a sleeping container when its
//! first byte has arrived. A scan of ports, which connects and sends nothing, wakes none. A silent connection
//! stays in the queue of the held socket, and the container accepts it at its next wake. The keeper has each
//! new connection looked at, and silent ones again at growing intervals (`dormouse_keeper`, `custody`).
//!
//! LIMIT: where a queue has no room for another connection the container is woken: silent clients would
//! keep others out. Unix sockets, and a drowsy container, wake at the connection.
//!
//! Uses `ground` and `hold`.

use dormouse_launch::Keeper;
use dormouse_model::Config;
use dormouse_parcel::Reader;
use dormouse_record::Thing;
use dormouse_stacks::stack;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::hold::NO_SOCKET;

/// Returns whether the only events of a sleeping container are silent clients. The caller holds its lock.
pub(crate) fn are_silent(ground: &Ground, config: &Config) -> Result<bool> {
    let id = config.id.as_str();
    let reader = Reader::open(&ground.asleep_dir(&config.id))?;
    let Some(mut keeper) = Keeper::connect(&ground.places.run)? else { return Ok(false) };
    if keeper.is_ready(id, NO_SOCKET)? {
        return Ok(false);
    }
    let mut has_silent = false;
    for (number, object) in (0..).zip(&reader.records().objects) {
        if !object.is_called_from_outside() || !keeper.is_ready(id, number)? {
            continue;
        }
        if !matches!(object.thing, Thing::Listener(_)) {
            return Ok(false);
        }
        let socket = keeper.take(id, number)?;
        let queue = stack::queue(&socket, &config.addresses);
        let queue = queue
            .map_err(|e| Error::file("cannot look at the queue of", "a held socket")(e.into()))?;
        if !queue.is_silent() {
            return Ok(false);
        }
        has_silent = true;
    }
    Ok(has_silent)
}
