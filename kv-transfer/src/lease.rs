//! One lease: a time-limited right to read one request's blocks.
//!
//! The capability is drawn by the exporter and travels only with the handle. The first claim binds it to one
//! importer's life; a rebind raises the epoch, which voids every former claim, and leaves it unbound again. A
//! lease ends by release, by its time, by the exporter's own decision, and by nothing that a peer must say.
//! Every refusal reads the same, so that a stranger cannot tell a wrong capability from an unknown request.

use tidemill_core::bounds::LEASE_TTL_US;
use tidemill_core::planted::PlantedBug;
use tidemill_core::{Capability, Epoch, Failure, FailureCode, Incarnation, RequestId, Timestamp};

/// What names a lease in a message: the right to it, under one epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseRef {
    /// Whose KV.
    pub request_id: RequestId,
    /// The right.
    pub capability: Capability,
    /// Which claim of it.
    pub epoch: Epoch,
}

/// The exporter's side of a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    capability: Capability,
    epoch: Epoch,
    importer: Option<Incarnation>,
    expires_at: Timestamp,
}

impl Lease {
    /// A lease that nobody has claimed yet.
    pub fn new(capability: Capability, now: Timestamp) -> Self {
        Self {
            capability,
            epoch: Epoch(1),
            importer: None,
            expires_at: now.plus_us(LEASE_TTL_US),
        }
    }

    /// The present epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// When it ends unless renewed.
    pub fn expires_at(&self) -> Timestamp {
        self.expires_at
    }

    /// The importer that has claimed it.
    pub fn importer(&self) -> Option<Incarnation> {
        self.importer
    }

    /// True when `lease` names this one under its present epoch.
    pub fn is_named_by(&self, lease: &LeaseRef) -> bool {
        let is_present = self.epoch == lease.epoch || PlantedBug::EpochUnchecked.is_on();
        self.capability == lease.capability && is_present
    }

    /// Binds to `importer`, or lets the importer that is bound claim again.
    ///
    /// # Errors
    /// `gone` for a wrong capability or epoch and for another importer.
    pub fn claim(
        &mut self,
        lease: &LeaseRef,
        importer: Incarnation,
        now: Timestamp,
    ) -> Result<(), Failure> {
        self.renew(lease, importer, now)?;
        self.importer = Some(importer);
        Ok(())
    }

    /// Starts its time again. An importer may renew before it claims, while it waits for blocks.
    ///
    /// # Errors
    /// `gone` as for a claim.
    pub fn renew(
        &mut self,
        lease: &LeaseRef,
        importer: Incarnation,
        now: Timestamp,
    ) -> Result<(), Failure> {
        let is_other = self.importer.is_some_and(|bound| bound != importer);
        if !self.is_named_by(lease) || is_other {
            return Err(gone(lease.request_id));
        }
        self.extend(now);
        Ok(())
    }

    /// Starts its time again because the exporter itself has a reason.
    pub fn extend(&mut self, now: Timestamp) {
        self.expires_at = self.expires_at.max(now.plus_us(LEASE_TTL_US));
    }

    /// Moves to the higher epoch of `lease` and waits for a new claim.
    ///
    /// # Errors
    /// `gone` for a wrong capability; `invalid_request` when the epoch is not higher.
    pub fn rebind(&mut self, lease: &LeaseRef, now: Timestamp) -> Result<(), Failure> {
        if self.capability != lease.capability {
            return Err(gone(lease.request_id));
        }
        if lease.epoch <= self.epoch {
            return Err(Failure::new(
                FailureCode::InvalidRequest,
                format!(
                    "epoch is {}; a rebind needs one above {}",
                    lease.epoch.0, self.epoch.0
                ),
            ));
        }
        self.epoch = lease.epoch;
        self.importer = None;
        self.extend(now);
        Ok(())
    }

    /// Checks the right to read.
    ///
    /// # Errors
    /// `gone` unless the lease is bound to exactly this importer under this epoch.
    pub fn check_read(&self, lease: &LeaseRef, importer: Incarnation) -> Result<(), Failure> {
        if self.is_named_by(lease) && self.importer == Some(importer) {
            return Ok(());
        }
        Err(gone(lease.request_id))
    }
}

/// The one answer to everybody without a live right.
pub fn gone(request_id: RequestId) -> Failure {
    Failure::new(
        FailureCode::Gone,
        format!("no live lease on request {request_id} for this capability, epoch and importer"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMPORTER: Incarnation = Incarnation(1);
    const OTHER: Incarnation = Incarnation(2);

    fn named(epoch: u32) -> LeaseRef {
        LeaseRef {
            request_id: RequestId(9),
            capability: Capability(7),
            epoch: Epoch(epoch),
        }
    }

    fn lease() -> Lease {
        Lease::new(Capability(7), Timestamp(0))
    }

    #[test]
    fn the_first_claim_binds_one_importer() {
        let mut lease = lease();
        assert_eq!(lease.claim(&named(1), IMPORTER, Timestamp(1)), Ok(()));
        assert_eq!(lease.claim(&named(1), IMPORTER, Timestamp(2)), Ok(()));
        assert_eq!(
            lease.claim(&named(1), OTHER, Timestamp(3)),
            Err(gone(RequestId(9)))
        );
        assert_eq!(lease.importer(), Some(IMPORTER));
    }

    #[test]
    fn a_rebind_voids_the_former_epoch() {
        let mut lease = lease();
        lease
            .claim(&named(1), IMPORTER, Timestamp(1))
            .expect("first");
        assert!(lease.rebind(&named(1), Timestamp(2)).is_err(), "not higher");
        lease.rebind(&named(3), Timestamp(2)).expect("higher");
        assert!(lease.check_read(&named(1), IMPORTER).is_err());
        assert!(lease.renew(&named(1), IMPORTER, Timestamp(3)).is_err());
        // Unbound until the new importer has claimed.
        assert!(lease.check_read(&named(3), OTHER).is_err());
        lease.claim(&named(3), OTHER, Timestamp(4)).expect("second");
        assert_eq!(lease.check_read(&named(3), OTHER), Ok(()));
    }

    #[test]
    fn a_wrong_capability_reads_like_an_unknown_request() {
        let mut lease = lease();
        let mut wrong = named(1);
        wrong.capability = Capability(8);
        assert_eq!(
            lease.claim(&wrong, IMPORTER, Timestamp(1)),
            Err(gone(RequestId(9)))
        );
        assert_eq!(lease.rebind(&wrong, Timestamp(1)), Err(gone(RequestId(9))));
    }

    #[test]
    fn renewing_moves_the_end_and_never_back() {
        let mut lease = lease();
        let first = lease.expires_at();
        assert_eq!(first, Timestamp(LEASE_TTL_US));
        lease
            .renew(&named(1), IMPORTER, Timestamp(10))
            .expect("live");
        assert_eq!(lease.expires_at(), first.plus_us(10));
        lease.extend(Timestamp(5));
        assert_eq!(lease.expires_at(), first.plus_us(10));
    }
}
