/* The record shared by the handshake program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_HANDSHAKE_RECORD_H
#define DORMOUSE_HANDSHAKE_RECORD_H

/* The options that both sides of a connection negotiated. */
struct dm_handshake {
	__u32 mark; /* of the packet that ends the handshake */
	__u32 timestamp; /* what our clock of time stamps says */
	__u16 segment_bytes; /* largest segment that the peer takes */
	__u8 scale_sent; /* window scales, of what is sent and of what is received */
	__u8 scale_received;
	__u8 scales; /* which of these were agreed upon at all: 0 or 1 */
	__u8 selective;
	__u8 timestamps;
	__u8 v6; /* the socket that listens is found by IPv6 */
	__u32 address[4]; /* at this address; by IPv4 the first alone */
	__be16 port;
	__u16 reserved;
};

#endif
