-- Relays of other kinds, after the seed's protocols; see README.md. Made in the schema that search_path begins with.

CREATE TABLE relays_may_run AS SELECT true AS yes;

-- Appends event ids to the file at once, whatever becomes of the transaction.
CREATE FUNCTION publish(file text, events uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('COPY (SELECT unnest(%L::uuid[])) TO PROGRAM %L', events, 'cat >>' || quote_literal(file));
END $$;

-- Retain: reclaim, claim by a commit, publish outside of the claim's transaction, marks in chunks of 32, a retry for one
-- row in `failing`.
CREATE PROCEDURE relay_retain(outbox text, file text, stale interval, batch int DEFAULT 50, failing int DEFAULT 20,
    pause float8 DEFAULT 0.005)
LANGUAGE plpgsql AS $$
DECLARE
    taken uuid[];
    events uuid[];
    failed uuid[];
BEGIN
    WHILE EXISTS (SELECT FROM relays_may_run) LOOP
        EXECUTE format('UPDATE %s SET status = ''pending'', processing_at = NULL
            WHERE status = ''processing'' AND processing_at < clock_timestamp() - $1', outbox) USING stale;
        COMMIT;
        EXECUTE format('WITH ripe AS (
                SELECT id FROM %s WHERE status = ''pending'' AND (available_at IS NULL OR available_at <= clock_timestamp())
                ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED),
            mine AS (
                UPDATE %s o SET status = ''processing'', processing_at = clock_timestamp() FROM ripe WHERE o.id = ripe.id
                RETURNING o.id, o.event_id, o.created_at)
            SELECT array_agg(id ORDER BY created_at), array_agg(event_id ORDER BY created_at) FROM mine', outbox, outbox)
            USING batch INTO taken, events;
        COMMIT;
        IF taken IS NULL THEN
            PERFORM pg_sleep(0.02);
            CONTINUE;
        END IF;
        failed := '{}';
        FOR at IN 1 .. cardinality(taken) BY 32 LOOP
            IF random() < 32.0 / failing THEN
                failed := failed || taken[at];
            END IF;
            PERFORM publish(file, ARRAY(SELECT e FROM unnest(taken[at:at + 31], events[at:at + 31]) AS u (i, e) WHERE i <> ALL (failed)));
            PERFORM pg_sleep(pause);
            EXECUTE format('UPDATE %s SET status = ''published'', published_at = clock_timestamp(), last_error = NULL
                WHERE id = ANY ($1) AND id <> ALL ($2) AND status = ''processing''', outbox) USING taken[at:at + 31], failed;
            COMMIT;
        END LOOP;
        EXECUTE format('UPDATE %s SET status = ''pending'', attempts = attempts + 1, last_error = ''theirs'', processing_at = NULL,
            available_at = clock_timestamp() + interval ''30 ms'' WHERE id = ANY ($1) AND status = ''processing''', outbox) USING failed;
        COMMIT;
    END LOOP;
END $$;

-- Consume: one transaction a pass; its rows are pending to others until it commits. Every `failing`th pass rolls back
-- before it publishes.
CREATE PROCEDURE relay_consume(outbox text, file text, batch int DEFAULT 50, failing int DEFAULT 20, pause float8 DEFAULT 0.005)
LANGUAGE plpgsql AS $$
DECLARE
    taken uuid[];
    events uuid[];
BEGIN
    WHILE EXISTS (SELECT FROM relays_may_run) LOOP
        EXECUTE format('SELECT array_agg(id), array_agg(event_id) FROM (
            SELECT id, event_id FROM %s WHERE status = ''pending'' AND (available_at IS NULL OR available_at <= clock_timestamp())
            ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED) AS mine', outbox) USING batch INTO taken, events;
        IF taken IS NULL THEN
            COMMIT;
            PERFORM pg_sleep(0.02);
            CONTINUE;
        END IF;
        IF random() < 1.0 / failing THEN
            ROLLBACK;
            CONTINUE;
        END IF;
        PERFORM publish(file, events);
        PERFORM pg_sleep(pause);
        EXECUTE format('DELETE FROM %s WHERE id = ANY ($1)', outbox) USING taken;
        COMMIT;
    END LOOP;
END $$;
