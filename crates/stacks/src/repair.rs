//! Repair mode of TCP sockets (TCP_REPAIR): its options and values.
//!
//! Crate `checkpoint` reads connections by them and makes connections again; [`crate::buffer`] uses the
//! lock of buffer sizes.

use std::net::SocketAddr;

use dormouse_record::{Bytes, Connection, TcpState};

/// The option of tcp(7) that begins and ends repair mode.
pub const REPAIR: i32 = 19;
/// The queue that later calls are about.
pub const REPAIR_QUEUE: i32 = 20;
/// The sequence number at the end of that queue.
pub const QUEUE_SEQUENCE: i32 = 21;
/// The clock of the connection's timestamps.
pub const TIMESTAMP: i32 = 24;
/// The windows of both sides (`struct tcp_repair_window`).
pub const REPAIR_WINDOW: i32 = 29;

/// Value of REPAIR: off, without a window probe to the peer.
pub const OFF_SILENTLY: i32 = -1;

/// Value of REPAIR_QUEUE: neither queue.
pub const NO_QUEUE: i32 = 0;
/// Value of REPAIR_QUEUE: unread bytes.
pub const RECEIVE_QUEUE: i32 = 1;
/// Value of REPAIR_QUEUE: unacknowledged bytes.
pub const SEND_QUEUE: i32 = 2;

/// SO_BUF_LOCK: which buffer sizes the program has set; the kernel adjusts the others.
pub const BUFFER_LOCK: i32 = 72;

/// The record of a connection before its queues and parameters are read.
pub fn unread(state: TcpState, peer: SocketAddr) -> Connection {
    Connection {
        state,
        peer,
        sent: Bytes::default(),
        unsent: Bytes::default(),
        sent_sequence: 0,
        received: Bytes::default(),
        received_sequence: 0,
        segment_bytes: 0,
        scales: None,
        selective: false,
        timestamp: None,
        window: [0; 5],
        buffers_bytes: (0, 0),
        buffers_locked: 0,
        window_bytes_max: 0,
        reads_no_more: false,
    }
}
