"""The parts of serving a request: its forms, the order of acknowledgement, the answers that are kept.

`agent.service.inference` puts them together.

A request takes six forms on its way: `Message` and `InferMessage` (MQTT), `Pending` (accepted, and not
answered yet), `Request` and `Answer` (frames to and from the worker), `FinalAnswer` (MQTT again). Its way to
the worker and back, in the order of the calls::

    Inference.on_message(Message)           a place in the order of acknowledgement (`AckOrder`)
      Pending.read(Message)                 or UnanswerableError: acknowledged, without an answer
      AnswerStore.get(key)                  delivered before? then it gets the answer of its first delivery
      Model.submit(Pending)                 the queue and the deadline; or a refusal at once
        Supervisor.send(Pending)            at most two requests are in a worker
          WorkerProcess.send(Request)       through a socket pair to `agent.worker`

          Supervisor._on_frame(Answer)      the worker answers in order
        Pending.answer, Pending.refuse      exactly once; a late answer is dropped
      Inference._answered, _refused         make the FinalAnswer
        Inference._finish                   AnswerStore.put, before it is published
          Inference._publish(FinalAnswer)   Connection.send

    Inference._settled(verdict)             the broker has the answer, or has refused it
      AnswerStore.delivered(key)
      Slot.finish                           acknowledges the request, and those after it that waited for it

`Pending.refuse` is also called by `Model`, when a deadline passes, the model is stopped or the request is
quarantined (`Quarantine`), and by `Supervisor`, when the request ended its second worker. Everything runs in
the event loop's thread; only the worker is another process.
"""
